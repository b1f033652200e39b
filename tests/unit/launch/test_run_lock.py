"""The lock of a run directory: one living holder, and none that the dead can keep."""

import errno
import fcntl
import os

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.run_lock import run_lock


def test_it_names_its_holder_while_held_and_nobody_afterwards(tmp_path):
    with run_lock(tmp_path / "new/run") as note:
        assert note is None
        text = (tmp_path / "new/run/lock").read_text()
        assert text.startswith(f"pid {os.getpid()} on ")
    assert (tmp_path / "new/run/lock").read_bytes() == b""


def test_a_disk_without_locks_is_told_and_used(tmp_path, monkeypatch):
    def fail(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    with run_lock(tmp_path) as note:
        assert note == (
            f"{tmp_path}/lock: this disk has no locks (Function not implemented); start no second job in this folder"
        )


@pytest.mark.parametrize(("supervised", "code"), [(True, 70), (False, 2)])
def test_a_predecessor_that_is_still_ending_is_waited_for_by_a_supervisor(
    tmp_path, monkeypatch, supervised, code
):
    if supervised:
        monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    with (
        run_lock(tmp_path),
        pytest.raises(
            UserError, match=rf"in use by pid {os.getpid()} on .*log\.run_dir"
        ) as refused,
    ):
        run_lock(tmp_path).__enter__()
    assert refused.value.exit_code == code
    with pytest.raises(UserError, match=r"/lock/run: Not a directory; give") as refused:
        run_lock(tmp_path / "lock/run").__enter__()
    assert refused.value.exit_code == 2
