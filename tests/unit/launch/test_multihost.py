"""Errors of one process that all raise."""

import errno
import os

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.launch import multihost
from ultrascale_jax.launch.failures import Damaged, NotNow
from ultrascale_jax.launch.multihost import on_all, on_process0
from ultrascale_jax.storage.remote import RemoteError, RemoteRefused


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (UserError("choose another"), UserError, "choose another"),
        (Damaged("step 3"), Damaged, "step 3"),
        (NotNow("later"), NotNow, "later"),
        (RemoteError("no network"), NotNow, "no network"),
        (RemoteRefused("no right"), UserError, "no right"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "f"), UserError, "f: Permission"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "f"), NotNow, "f: cannot be read on .*Input"),
    ],
)
def test_an_error_is_raised_in_the_kind_that_has_its_exit_code(error, kind, words):
    def fail():
        raise error

    for together in (on_all, on_process0):
        with pytest.raises(UserError, match=words) as raised:
            together(fail)
        assert type(raised.value) is kind


def test_the_error_of_another_process_is_raised_here_too(monkeypatch):
    monkeypatch.setattr(multihost, "gather", lambda value: [value, [3, "step 3 on the other host"]])
    with pytest.raises(Damaged, match="step 3 on the other host"):
        on_all(lambda: "well")
