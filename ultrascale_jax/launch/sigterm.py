"""Remember signals from the first moment of a process until the run can stop in good order.

A script that may run for days listens before its long imports. Once the processes of a job have joined, JAX listens
instead, and this module passes an earlier signal on.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any


class SignalListener:
    """Remembers SIGTERM, and other signals, inside its `with` block; it is the handler itself: `listener` finds it."""

    def __init__(self, *signals: signal.Signals):
        self.signals: list[int] = []
        """The signals that came."""
        self._numbers = (signal.SIGTERM, *signals)
        self._before: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> bool:
        return bool(self.signals)

    def __enter__(self) -> "SignalListener":
        # Python hands signals to the main thread only; elsewhere the process that embeds the run keeps its own handler.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self) for number in self._numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    def hand_over(self) -> None:
        """Leave SIGTERM to the handler that JAX has put in this one's place, and send it again if it came before."""
        self._before = {}
        if self.received:
            os.kill(os.getpid(), signal.SIGTERM)


def listener() -> SignalListener | None:
    """Return the listener whose `with` block this process is in; None without one."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, SignalListener) else None
