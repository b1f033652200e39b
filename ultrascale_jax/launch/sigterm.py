"""Remember SIGTERM from the first moment of a process until the run can stop in good order.

A script that may run for days listens before its long imports. Once the processes of a job have joined, JAX listens
instead, and this module passes an earlier signal on.
"""

import os
import signal
import threading
from types import FrameType


class SigtermListener:
    """Remembers SIGTERM inside its `with` block; it is the handler itself, so `listener` finds it."""

    def __init__(self):
        self.received = False
        self._listens = False

    def __enter__(self) -> "SigtermListener":
        # Python hands signals to the main thread only; elsewhere the process that embeds the run keeps its own handler.
        if threading.current_thread() is threading.main_thread():
            self._before, self._listens = signal.signal(signal.SIGTERM, self), True
        return self

    def __exit__(self, *_) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def hand_over(self) -> None:
        """Leave SIGTERM to the handler that JAX has put in this one's place, and send it again if it came before."""
        self._listens = False
        if self.received:
            os.kill(os.getpid(), signal.SIGTERM)


def listener() -> SigtermListener | None:
    """Return the listener whose `with` block this process is in; None without one."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, SigtermListener) else None
