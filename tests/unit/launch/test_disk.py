"""A disk that does not answer holds nobody up."""

import threading
import time

from ultrascale_jax.launch.disk import Disk


def test_a_call_that_is_not_answered_is_not_waited_for_twice_and_done_later():
    go, disk, done = threading.Event(), Disk(), []

    def call(name):
        assert go.wait(300)
        done.append(name)
        return name

    assert disk.ask(lambda: call("first"), 0.05) is None
    begun = time.monotonic()
    assert disk.ask(lambda: call("second"), 1e6) is None and time.monotonic() - begun < 300
    go.set()
    while len(done) < 2:
        time.sleep(0.01)
    assert disk.ask(lambda: call("third"), 300) == "third" and done == ["first", "second", "third"]


def test_an_error_of_the_disk_is_no_answer():
    def fail():
        raise OSError("gone")

    assert Disk().ask(fail, 60) is None
