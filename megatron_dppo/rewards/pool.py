"""Rewards in processes of their own: one that hangs, dies or eats memory costs a sample, never the run."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from time import monotonic
from types import MappingProxyType

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardFault, RewardFaultKind, RewardRequest, RewardResult
from megatron_dppo.rewards.worker_process import GivenUpError, LostError, WorkerProcess

_AHEAD_S = 0.02  # of work that a worker is sent in advance: cheap rewards need not wait for the trainer
_MAX_AHEAD = 32
_MAX_LATE_IN_A_ROW = 16


class RewardPool:
    """Worker processes that score responses, for the life of a run; they start when there is work."""

    def __init__(self, name: str, *, num_workers: int, timeout_s: float, memory_mb: int) -> None:
        """Say what to run.

        Args:
            name: Of the reward, as in `data.reward`.
            num_workers: Processes.
            timeout_s: Seconds that one response may take.
            memory_mb: What a worker may allocate besides what importing the reward took; 0 is no limit.
        """
        self._name, self._timeout_s, self._memory_mb = name, timeout_s, memory_mb
        self._num_workers = num_workers
        self._idle: SimpleQueue[WorkerProcess | None] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def start(self) -> None:
        """Load the reward in one worker now: one that cannot be loaded should stop a run before it samples.

        Raises:
            RewardError: It cannot be loaded.
        """
        worker = self._idle.get()
        try:
            worker = worker or WorkerProcess(self._name, self._memory_mb, Event())
        finally:
            self._idle.put(worker)

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Score all, in order. What happens to one response does not touch the others.

        An exception that a signal raises here ends the workers at work; the next call starts others.

        Raises:
            RewardError: The reward cannot be loaded, or 16 responses in a row timed out.
        """
        if not requests:
            return []
        job = _Job(requests)
        with ThreadPoolExecutor(min(self._num_workers, len(requests)), thread_name_prefix="reward") as threads:
            try:
                drives = [
                    threads.submit(self._drive, job) for _ in range(min(self._num_workers, len(requests)))
                ]
                for drive in drives:
                    drive.result()
            finally:
                job.given_up.set()  # where all is done, nobody looks
        return [job.verdicts[number] for number in range(len(requests))]

    def close(self) -> None:
        """End the workers and all that they have started; the next `score` would start others."""
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

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drive(self, job: "_Job") -> None:
        """Have one worker, and its successors, score what no other has taken."""
        worker = self._idle.get()
        sent: deque[int] = deque()  # the numbers of requests whose answers are due, oldest first
        max_sent = 1
        try:
            while job.todo or sent:
                if worker is None:
                    worker = WorkerProcess(self._name, self._memory_mb, job.given_up)
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
        self, worker: WorkerProcess, number: int, job: "_Job"
    ) -> tuple[RewardResult | RewardFault, bool]:
        """What became of a request, and whether the worker is lost with it."""
        try:
            answer = worker.receive(number, self._timeout_s, job.given_up)
        except LostError as lost:
            kind, found, said = lost.kind, str(lost), lost.said
        else:
            if isinstance(answer, RewardResult) or answer.kind != "reward_out_of_memory":
                return answer, False
            kind, found, said = answer.kind, f"found that {self._memory_mb} MiB did not do", ""
        message = f"prompt {job.requests[number].prompt.id}: {found}. {_ACTIONS[kind]}{said}"
        return RewardFault(kind, message), True


_ACTIONS: Mapping[RewardFaultKind, str] = MappingProxyType(
    {
        "reward_failed": "Correct the reward.",
        "reward_timed_out": "Correct the reward, or raise data.reward_timeout_s.",
        "reward_out_of_memory": "Correct the reward, or raise data.reward_memory_mb.",
    }
)


class _Job:
    """The requests of one call, and what became of them."""

    def __init__(self, requests: Sequence[RewardRequest]) -> None:
        self.requests = requests
        self.todo = deque(range(len(requests)))
        self.verdicts: dict[int, RewardResult | RewardFault] = {}
        self.given_up = Event()
        self.num_late = 0  # in a row

    def keep(self, number: int, verdict: RewardResult | RewardFault) -> None:
        """A request was answered.

        Raises:
            RewardError: The reward answers none: waiting for each of the rest would take hours.
        """
        self.verdicts[number] = verdict
        is_late = isinstance(verdict, RewardFault) and verdict.kind == "reward_timed_out"
        self.num_late = self.num_late + 1 if is_late else 0
        if self.num_late >= _MAX_LATE_IN_A_ROW:
            message = verdict.message if isinstance(verdict, RewardFault) else ""
            self.given_up.set()
            raise RewardError(
                f"data.reward: {_MAX_LATE_IN_A_ROW} responses in a row timed out. The last: {message}"
            )

    def take(self) -> int | None:
        """The next request that nobody scores; several threads ask."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None
