"""Sends requests to worker processes and replaces lost ones: a hang, a crash or a leak costs one request."""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from itertools import chain, count
from queue import Empty, LifoQueue
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Generic, NotRequired, TypedDict

from megatron_dppo.workers.service import A, FileDigests, Q, Service, WorkerFault, WorkerFaultKind
from megatron_dppo.workers.worker_process import CallCancelledError, IsCancelled, WorkerLostError, WorkerProcess

_AHEAD_S = 0.02  # seconds of work sent to a worker in advance, so that cheap code need not wait for the trainer
_MAX_AHEAD = 32
_PATIENCE_S = 1.0  # after it, other workers take the requests that were sent in advance after a slow one
_LINGERS_S = 1.0  # time that a thread keeps its worker without work: a new worker per request costs more
_FORGETS = 0.95  # decay per request of the expected time of a slow request
_MAX_LATE_IN_A_ROW = 16
_MOST_WAIT_S = 1.0


class Limits(TypedDict):
    """Arguments by name of every pool, see `WorkerPool`."""

    num_workers: int
    timeout_s: float
    memory_mb: int
    environment: NotRequired[Collection[str]]


class WorkerPool(Generic[Q, A]):
    """Worker processes of a service, for the life of a run; they start when there is work.

    Any number of threads may call `submit` and `ask` at once. All requests are in one queue, and each free
    worker takes the next one.
    """

    def __init__(
        self,
        service: Service[Q, A],
        name: str,
        *,
        num_workers: int,
        timeout_s: float,
        memory_mb: int,
        environment: Collection[str] = (),
    ) -> None:
        """Store the settings, and start no worker.

        Args:
            service: Kind of worker.
            name: Name of the user's code in the config.
            num_workers: Number of processes.
            timeout_s: Time limit of one request, in seconds.
            memory_mb: Memory that a worker may allocate after its import, in MB; 0 is no limit.
            environment: Names of environment variables that workers get although they look like secrets.
        """
        self._service, self._environment = service, environment
        self._name, self._timeout_s, self._memory_mb = name, timeout_s, memory_mb
        self._num_workers, self._files = num_workers, FileDigests()
        self._idle: LifoQueue[WorkerProcess[Q, A] | None] = LifoQueue()  # `None`: a worker to start
        for _ in range(num_workers):
            self._idle.put(None)
        self._closing, self._lock, self._numbers = Lock(), Lock(), count()
        self._has_work, self._is_closing = Condition(self._lock), False
        self._todo: deque[_Call[Q, A]] = deque()
        self._lines: dict[int, deque[_Call[Q, A]]] = {}  # calls that each active thread has taken, oldest first
        self._num_late = 0  # number of requests in a row that timed out
        self._slow_s = _AHEAD_S  # recent time of a slow request

    @property
    def files(self) -> FileDigests:
        """Path and digest of each file that the workers have read so far; see `user_code.FilesRead`."""
        return self._files.copy()

    def start(self) -> None:
        """Load the code in one worker now, so that code that cannot be loaded stops a run before it samples."""
        worker = self._idle.get()
        try:
            worker = worker or self._start_worker(lambda: False)
        finally:
            self._idle.put(worker)

    def submit(self, *requests: Q) -> "list[Future[A | WorkerFault]]":
        """Return the future reply to each request; see `ask` for their errors.

        Cancelling a future ends the worker that processes its request, if there is one.
        """
        calls = [_Call[Q, A](next(self._numbers), request) for request in requests]
        self._queue(calls)
        return [call.answer for call in calls]

    async def ask_one(self, request: Q) -> A | WorkerFault:
        """Return the reply to one request, while others are processed; see `ask` for its errors.

        Cancelling this ends the worker that processes the request, if there is one.
        """
        (answer,) = self.submit(request)
        return await asyncio.wrap_future(answer)

    def ask(self, requests: Sequence[Q]) -> list[A | WorkerFault]:
        """Return a reply to each request, in order. A failed request does not affect the others.

        If a signal raises an exception here, the workers that process these requests end and are replaced.
        """
        calls = [_Call[Q, A](next(self._numbers), request) for request in requests]
        answers = [call.answer for call in calls]
        try:
            self._queue(calls)
            # Python handles a signal that comes just before a wait only after it: no wait may be long.
            while wait(answers, _MOST_WAIT_S).not_done:
                pass
            return [answer.result() for answer in answers]
        finally:
            self._cancel(calls)

    def close(self) -> None:
        """End the workers and the processes they have started, and cancel pending requests.

        A later request starts new workers.
        """
        with self._closing:
            self._is_closing = True
            self._cancel_all()
            workers: list[WorkerProcess[Q, A] | None] = []
            try:
                while len(workers) < self._num_workers:
                    try:
                        workers.append(self._idle.get(timeout=_MOST_WAIT_S))
                    except Empty:
                        self._cancel_all()  # requests that came meanwhile
                for worker in filter(None, workers):
                    worker.ask_to_end()
                for worker in filter(None, workers):
                    worker.kill(grace_s=1.0)
            finally:
                self._is_closing = False
                for _ in workers:
                    self._idle.put(None)

    def _cancel_all(self) -> None:
        """Cancel all calls, and let threads without work end."""
        with self._lock:
            calls = [*self._todo, *chain.from_iterable(self._lines.values())]
            self._has_work.notify_all()
        self._cancel(calls)

    def _queue(self, calls: "Sequence[_Call[Q, A]]") -> None:
        """Queue calls, and start threads for free workers."""
        with self._lock:
            self._todo += calls
            self._start_threads()

    def _start_threads(self) -> None:
        """Start a thread for each free worker that is needed, and wake idle threads. Call it with the lock."""
        num_waiting = sum(not line for line in self._lines.values())  # threads about to take a call
        for _ in range(min(self._num_workers - len(self._lines), len(self._todo) - num_waiting)):
            number, line = next(self._numbers), deque[_Call[Q, A]]()
            thread = Thread(target=self._drive, args=(number, line), name=self._service.noun, daemon=True)
            self._lines[number] = line
            try:
                thread.start()
            except BaseException:  # a signal, or no thread was left
                del self._lines[number]  # the thread adds it if it runs
                raise
        self._has_work.notify(len(self._todo))

    def _cancel(self, calls: "Sequence[_Call[Q, A]]") -> None:
        """Cancel unfinished calls, and wait until no worker processes them."""
        if all(call.answer.done() and not call.answer.cancelled() for call in calls):
            return
        for call in calls:
            call.answer.cancel()
        with self._lock:
            over = [call for call in self._todo if call.is_over()]
            self._todo = deque(call for call in self._todo if not call.is_over())
            active = set(chain.from_iterable(self._lines.values()))
        for call in over:
            call.end(None)
        wait([call.answer for call in calls if call in active])

    def _drive(self, number: int, line: "deque[_Call[Q, A]]") -> None:
        """Process requests until none is queued, with one worker and its replacements."""
        with self._lock:
            self._lines[number] = line
        worker = self._idle.get()
        try:
            while True:
                answer, is_lost = None, True
                try:
                    while not line or worker is None or (len(line) < self._most_sent and worker.is_writable):
                        if (call := self._take(number)) is None:
                            break
                        worker = worker or self._start_worker(call.is_over)
                        worker.send(call.number, call.request)
                    if worker is None or not line:
                        return
                    answer, is_lost = self._answer(worker, line)
                except CallCancelledError:
                    pass  # nobody waits for the oldest request
                except BaseException as error:  # noqa: BLE001 - raised in the threads that wait for replies
                    self._fail(error)
                if is_lost and worker is not None:
                    worker.kill()
                    worker = None
                self._end_oldest(line, answer, is_lost=is_lost)
        finally:
            self._idle.put(worker)

    def _take(self, number: int) -> "_Call[Q, A] | None":
        """Add the next call to a thread's line and return it, or return None if the thread gets no call.

        A thread without calls waits `_LINGERS_S` for one. A thread with calls leaves one call per free worker.
        """
        while True:
            with self._lock:
                line = self._lines[number]
                if not line:
                    self._has_work.wait_for(lambda: self._todo or self._is_closing, _LINGERS_S)
                num_free = self._num_workers - sum(map(bool, self._lines.values()))
                if len(self._todo) <= (num_free if line else 0):
                    if not line:
                        del self._lines[number]
                    return None
                call = self._todo.popleft()
                if not call.is_over():
                    line.append(call)
                    return call
            call.end(None)

    @property
    def _most_sent(self) -> int:
        """Most requests that a worker may have. Requests after a slow one wait for `_PATIENCE_S` at most."""
        return max(1, min(_MAX_AHEAD, int(_AHEAD_S / self._slow_s)))

    def _start_worker(self, is_cancelled: IsCancelled) -> WorkerProcess[Q, A]:
        limits = self._memory_mb, is_cancelled, self._environment
        return WorkerProcess(self._service, self._name, *limits, self._files)

    def _answer(self, worker: WorkerProcess[Q, A], line: "deque[_Call[Q, A]]") -> tuple[A | WorkerFault, bool]:
        """Return the reply to the oldest request of a line, and whether the worker must be replaced."""
        call, asked_at, is_slow = line[0], monotonic(), False

        def is_over() -> bool:
            nonlocal is_slow
            if len(line) > 1 and monotonic() - asked_at > _PATIENCE_S:
                is_slow = True
                self._requeue_later_calls(line)
            return call.is_over()

        try:
            answer = worker.receive(call.number, self._timeout_s, is_over)
            self._slow_s = max(monotonic() - asked_at, _FORGETS * self._slow_s)
        except WorkerLostError as lost:
            kind, found, printed = lost.kind, str(lost), lost.printed
        else:
            if not isinstance(answer, WorkerFault) or answer.kind != "out_of_memory":
                return answer, is_slow  # a slow worker would process requests that others have taken
            kind, found, printed = answer.kind, f"found that {self._memory_mb} MiB were not enough", ""
        request = self._service.describe_request(call.request)
        return WorkerFault(kind, f"{request}: {found}. {self._action(kind)}{printed}"), True

    def _requeue_later_calls(self, line: "deque[_Call[Q, A]]") -> None:
        """Move all calls of a line except the oldest back to the front of the queue."""
        with self._lock:
            while len(line) > 1:
                self._todo.appendleft(line.pop())
            self._start_threads()

    def _action(self, kind: WorkerFaultKind) -> str:
        options = {"timed_out": "timeout_s", "out_of_memory": "memory_mb"}
        raises = f", or raise {self._service.option_prefix}{options[kind]}" if kind in options else ""
        return f"Correct the {self._service.noun}{raises}."

    def _end_oldest(self, line: "deque[_Call[Q, A]]", answer: A | WorkerFault | None, *, is_lost: bool) -> None:
        """End the oldest call of a line. If the worker is lost, queue the other calls again, at the front."""
        with self._lock:
            call = line.popleft()
            if is_lost:
                self._todo.extendleft(reversed(line))
                line.clear()
            is_late = isinstance(answer, WorkerFault) and answer.kind == "timed_out"
            self._num_late = self._num_late + 1 if is_late else 0 if answer is not None else self._num_late
            is_hopeless = self._num_late >= _MAX_LATE_IN_A_ROW
        if is_hopeless and isinstance(answer, WorkerFault):  # waiting for all other requests would take hours
            found = f"{_MAX_LATE_IN_A_ROW} requests in a row timed out. The last: {answer.message}"
            call.error = self._service.error(f"{self._service.key}: {found}")
            self._fail(call.error)
        call.end(answer)

    def _fail(self, error: BaseException) -> None:
        """End all calls with an error: queued calls now, active calls when their threads notice."""
        with self._lock:
            self._num_late = 0
            queued, self._todo = self._todo, deque()
            for call in chain(queued, *self._lines.values()):
                call.error = error
        for call in queued:
            call.end(None)


class _Call(Generic[Q, A]):
    """A request and its future reply; only the thread that has taken the call sets the reply."""

    def __init__(self, number: int, request: Q) -> None:
        self.number, self.request = number, request
        self.answer: Future[A | WorkerFault] = Future()
        self.error: BaseException | None = None

    def is_over(self) -> bool:
        """Return whether nobody waits for a worker's reply any more."""
        return self.error is not None or self.answer.cancelled()

    def end(self, answer: A | WorkerFault | None) -> None:
        """Set the reply or the error, unless the call was cancelled."""
        if not self.answer.set_running_or_notify_cancel():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            assert answer is not None, "calls end with a reply unless they are over"
            self.answer.set_result(answer)
