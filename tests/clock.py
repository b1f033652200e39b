"""A clock that only a test moves."""

import time

import pytest


class Clock:
    """The wall's and the monotonic seconds of this process, from its making to the end of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1e9
        monkeypatch.setattr(time, "monotonic", lambda: self.now - 9e8)
        monkeypatch.setattr(time, "time", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
