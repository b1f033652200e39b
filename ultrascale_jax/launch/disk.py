"""Ask a disk, or a server, that may not answer for hours."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Disk:
    """Does calls in a thread, in order, and waits a bounded time for each."""

    def __init__(self):
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future]] = queue.SimpleQueue()
        self._unanswered: Future | None = None
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def submit[T](self, call: Callable[[], T]) -> Future[T]:
        """Return the answer of `call()` to come, which can be cancelled while an earlier call is under way."""
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        return answer

    def ask[T](self, call: Callable[[], T], timeout_s: float = 5.0) -> T | None:
        """Return `call()`; None if it fails by an `OSError`, or takes longer: then it is done later.

        None is returned at once while an earlier call is under way.
        """
        answer = self.submit(call)
        if self._unanswered is not None and not self._unanswered.done():
            timeout_s = 0.0
        with contextlib.suppress(OSError):  # `TimeoutError` is one
            return answer.result(timeout_s)
        self._unanswered = answer
        return None

    def _run(self) -> None:
        while True:
            call, answer = self._calls.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)
