"""Sends requests to worker processes and replaces lost ones: a hang, a crash or a leak costs one request."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from time import monotonic
from typing import Generic

from megatron_dppo.workers.service import A, Q, Service, WorkerFault, WorkerFaultKind
from megatron_dppo.workers.worker_process import CallCancelledError, WorkerLostError, WorkerProcess

_AHEAD_S = 0.02  # of work that a worker is sent in advance: cheap code need not wait for the trainer
_MAX_AHEAD = 32
_MAX_LATE_IN_A_ROW = 16


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
            MegatronDppoError: It cannot be loaded; the service's own kind of error.
        """
        worker = self._idle.get()
        try:
            worker = worker or WorkerProcess(self._service, self._name, self._memory_mb, Event())
        finally:
            self._idle.put(worker)

    def ask(self, requests: Sequence[Q]) -> list[A | WorkerFault]:
        """Return an answer to each request, in order. A failed request does not touch the others.

        An exception that a signal raises here ends the workers at work; the next call starts others.

        Raises:
            MegatronDppoError: The code cannot be loaded, or 16 requests in a row timed out; the service's own
                kind of error.
        """
        if not requests:
            return []
        job = _Job[Q, A](requests, self._service)
        num_threads, prefix = min(self._num_workers, len(requests)), self._service.noun
        with ThreadPoolExecutor(num_threads, thread_name_prefix=prefix) as threads:
            try:
                drives = [threads.submit(self._drive, job) for _ in range(num_threads)]
                for drive in drives:
                    drive.result()
            finally:
                job.cancelled.set()  # where all is done, nobody looks
        return [job.answers[number] for number in range(len(requests))]

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
                    worker = WorkerProcess(self._service, self._name, self._memory_mb, job.cancelled)
                while len(sent) < max_sent and worker.is_writable and (number := job.take()) is not None:
                    sent.append(number)
                    worker.send(number, job.requests[number])
                if not sent:
                    return  # another thread was faster
                asked_at = monotonic()
                answer, is_lost = self._answer(worker, sent[0], job)
                job.keep(sent.popleft(), answer)
                max_sent = max(1, min(_MAX_AHEAD, int(_AHEAD_S / max(monotonic() - asked_at, 1e-6))))
                if is_lost:
                    job.todo.extendleft(reversed(sent))
                    sent.clear()
                    worker.kill()
                    worker, max_sent = None, 1
        except CallCancelledError:
            pass  # ask() says why
        except BaseException:
            job.cancelled.set()
            raise
        finally:
            if worker is not None and sent:  # its answers would come to the next call
                worker.kill()
                worker = None
            self._idle.put(worker)

    def _answer(
        self, worker: WorkerProcess[Q, A], number: int, job: "_Job[Q, A]"
    ) -> tuple[A | WorkerFault, bool]:
        """Return the answer to a request, and whether the worker is lost with it."""
        try:
            answer = worker.receive(number, self._timeout_s, job.cancelled)
        except WorkerLostError as lost:
            kind, found, printed = lost.kind, str(lost), lost.printed
        else:
            if not isinstance(answer, WorkerFault) or answer.kind != "out_of_memory":
                return answer, False
            kind, found, printed = answer.kind, f"found that {self._memory_mb} MiB did not do", ""
        request = self._service.describe_request(job.requests[number])
        return WorkerFault(kind, f"{request}: {found}. {self._action(kind)}{printed}"), True

    def _action(self, kind: WorkerFaultKind) -> str:
        options = {"timed_out": "timeout_s", "out_of_memory": "memory_mb"}
        raises = f", or raise {self._service.option_prefix}{options[kind]}" if kind in options else ""
        return f"Correct the {self._service.noun}{raises}."


class _Job(Generic[Q, A]):
    """The requests of one call, and their answers so far."""

    def __init__(self, requests: Sequence[Q], service: Service[Q, A]) -> None:
        self.requests, self._service = requests, service
        self.todo = deque(range(len(requests)))
        self.answers: dict[int, A | WorkerFault] = {}
        self.cancelled = Event()
        self.num_late = 0  # in a row

    def keep(self, number: int, answer: A | WorkerFault) -> None:
        """Store the answer to a request.

        Raises:
            MegatronDppoError: The code answers none: waiting for each of the rest would take hours.
        """
        self.answers[number] = answer
        is_late = isinstance(answer, WorkerFault) and answer.kind == "timed_out"
        self.num_late = self.num_late + 1 if is_late else 0
        if self.num_late >= _MAX_LATE_IN_A_ROW:
            message = answer.message if isinstance(answer, WorkerFault) else ""
            self.cancelled.set()
            found = f"{_MAX_LATE_IN_A_ROW} requests in a row timed out. The last: {message}"
            raise self._service.error(f"{self._service.key}: {found}")

    def take(self) -> int | None:
        """Return the next request that no thread has taken; several threads call this."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None
