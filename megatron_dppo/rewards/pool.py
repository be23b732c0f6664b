"""Runs user code in processes of its own, so that a hang, a crash or a leak costs one sample."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from time import monotonic
from typing import Generic, Protocol, TypeVar

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardFault, RewardFaultKind, RewardRequest, RewardResult
from megatron_dppo.rewards.choice import RewardChoice
from megatron_dppo.rewards.wire import read_verdict, request_line
from megatron_dppo.rewards.worker_process import A, GivenUpError, LostError, Service, WorkerProcess
from megatron_dppo.types import Prompt

_AHEAD_S = 0.02  # of work that a worker is sent in advance: cheap rewards need not wait for the trainer
_MAX_AHEAD = 32
_MAX_LATE_IN_A_ROW = 16


class _AboutPrompt(Protocol):
    """A request that names its prompt, for messages."""

    @property
    def prompt(self) -> Prompt: ...


Q = TypeVar("Q", bound=_AboutPrompt)


class WorkerPool(Generic[Q, A]):
    """Worker processes of a service, for the life of a run; they start when there is work."""

    def __init__(
        self, service: Service[Q, A], name: str, *, num_workers: int, timeout_s: float, memory_mb: int
    ) -> None:
        """Store what to run, and start nothing.

        Args:
            service: What workers do.
            name: Of the user's code, as the config has it.
            num_workers: Processes.
            timeout_s: Seconds that one answer may take.
            memory_mb: What a worker may allocate besides what importing the code took; 0 is no limit.
        """
        self._service = service
        self._name, self._timeout_s, self._memory_mb = name, timeout_s, memory_mb
        self._num_workers = num_workers
        self._idle: SimpleQueue[WorkerProcess[Q, A] | None] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def start(self) -> None:
        """Load the code in one worker now, so that code that cannot be loaded stops a run before it samples.

        Raises:
            RewardError: It cannot be loaded.
        """
        worker = self._idle.get()
        try:
            worker = worker or WorkerProcess(self._service, self._name, self._memory_mb, Event())
        finally:
            self._idle.put(worker)

    def ask(self, requests: Sequence[Q]) -> list[A | RewardFault]:
        """Return an answer to each request, in order. A failed request does not touch the others.

        An exception that a signal raises here ends the workers at work; the next call starts others.

        Raises:
            RewardError: The code cannot be loaded, or 16 answers in a row timed out.
        """
        if not requests:
            return []
        job = _Job[Q, A](requests, self._service.key)
        num_threads, prefix = min(self._num_workers, len(requests)), self._service.noun
        with ThreadPoolExecutor(num_threads, thread_name_prefix=prefix) as threads:
            try:
                drives = [threads.submit(self._drive, job) for _ in range(num_threads)]
                for drive in drives:
                    drive.result()
            finally:
                job.given_up.set()  # where all is done, nobody looks
        return [job.verdicts[number] for number in range(len(requests))]

    def close(self) -> None:
        """End the workers and the processes they have started; the next call would start others."""
        slots = [self._idle.get() for _ in range(self._num_workers)]
        workers = [worker for worker in slots if worker is not None]
        try:
            for worker in workers:
                worker.ask_to_end()
            for worker in workers:
                worker.kill(grace_s=1.0)
        finally:
            for _ in slots:
                self._idle.put(None)

    def _drive(self, job: "_Job[Q, A]") -> None:
        """Answer requests that no other thread has taken, by one worker and its successors."""
        worker = self._idle.get()
        sent: deque[int] = deque()  # the numbers of requests whose answers are due, oldest first
        max_sent = 1
        try:
            while job.todo or sent:
                if worker is None:
                    worker = WorkerProcess(self._service, self._name, self._memory_mb, job.given_up)
                while len(sent) < max_sent and worker.is_writable and (number := job.take()) is not None:
                    sent.append(number)
                    worker.send(number, job.requests[number])
                if not sent:
                    return  # another thread was faster
                asked_at = monotonic()
                verdict, is_lost = self._answer(worker, sent[0], job)
                job.keep(sent.popleft(), verdict)
                max_sent = max(1, min(_MAX_AHEAD, int(_AHEAD_S / max(monotonic() - asked_at, 1e-6))))
                if is_lost:
                    job.todo.extendleft(reversed(sent))
                    sent.clear()
                    worker.kill()
                    worker, max_sent = None, 1
        except GivenUpError:
            pass  # score() says why
        except BaseException:
            job.given_up.set()
            raise
        finally:
            if worker is not None and sent:  # its answers would come to the next call
                worker.kill()
                worker = None
            self._idle.put(worker)

    def _answer(
        self, worker: WorkerProcess[Q, A], number: int, job: "_Job[Q, A]"
    ) -> tuple[A | RewardFault, bool]:
        """Return the answer to a request, and whether the worker is lost with it."""
        try:
            answer = worker.receive(number, self._timeout_s, job.given_up)
        except LostError as lost:
            kind, found, said = lost.kind, str(lost), lost.said
        else:
            if not isinstance(answer, RewardFault) or answer.kind != "reward_out_of_memory":
                return answer, False
            kind, found, said = answer.kind, f"found that {self._memory_mb} MiB did not do", ""
        message = f"prompt {job.requests[number].prompt.id}: {found}. {self._action(kind)}{said}"
        return RewardFault(kind, message), True

    def _action(self, kind: RewardFaultKind) -> str:
        options = {"reward_timed_out": "timeout_s", "reward_out_of_memory": "memory_mb"}
        raises = f", or raise data.reward_{options[kind]}" if kind in options else ""
        return f"Correct the {self._service.noun}{raises}."


class RewardPool(WorkerPool[RewardRequest, RewardResult]):
    """Workers that score responses."""

    def __init__(
        self, choice: str | RewardChoice, *, num_workers: int, timeout_s: float, memory_mb: int
    ) -> None:
        """See `WorkerPool`; `choice` is what to reward by, or its text: a name alone is one reward."""
        name = choice if isinstance(choice, str) else choice.text
        super().__init__(_SERVICE, name, num_workers=num_workers, timeout_s=timeout_s, memory_mb=memory_mb)

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return a score for each request, in order; see `WorkerPool.ask`."""
        return self.ask(requests)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_SERVICE = Service("megatron_dppo.rewards.worker", "data.reward", "reward", request_line, read_verdict)


class _Job(Generic[Q, A]):
    """The requests of one call, and their answers so far."""

    def __init__(self, requests: Sequence[Q], key: str) -> None:
        self.requests, self._key = requests, key
        self.todo = deque(range(len(requests)))
        self.verdicts: dict[int, A | RewardFault] = {}
        self.given_up = Event()
        self.num_late = 0  # in a row

    def keep(self, number: int, verdict: A | RewardFault) -> None:
        """Store the answer to a request.

        Raises:
            RewardError: The code answers none: waiting for each of the rest would take hours.
        """
        self.verdicts[number] = verdict
        is_late = isinstance(verdict, RewardFault) and verdict.kind == "reward_timed_out"
        self.num_late = self.num_late + 1 if is_late else 0
        if self.num_late >= _MAX_LATE_IN_A_ROW:
            message = verdict.message if isinstance(verdict, RewardFault) else ""
            self.given_up.set()
            raise RewardError(
                f"{self._key}: {_MAX_LATE_IN_A_ROW} responses in a row timed out. The last: {message}"
            )

    def take(self) -> int | None:
        """Return the next request that no thread has taken; several threads call this."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None
