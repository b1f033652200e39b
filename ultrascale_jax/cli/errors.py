"""Turn errors that a user can fix into one line and an exit code."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.cluster import detect
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.failures import denied

PATIENCE_S = 10.0
"""Seconds for which a process other than 0 withholds an error that process 0 must have too."""


@contextlib.contextmanager
def user_errors(patience_s: float = 0.0) -> Iterator[None]:
    """Turn a `UserError` of the block, or a file that it may not use, into one line on stderr and its exit code.

    Processes of a job that have not joined yet do not know of each other. A command line that is wrong for all should
    be reported once, so all but process 0 wait `patience_s`, in which the launcher ends them because process 0 ended.
    """
    try:
        yield
    except (UserError, OSError) as error:
        refusal = error if isinstance(error, UserError) else denied(error)
        if refusal is None:
            raise
        if patience_s and _is_follower():
            time.sleep(patience_s)
        say(f"error: {refusal}", sys.stderr)
        raise SystemExit(refusal.exit_code) from None


def _is_follower() -> bool:
    """Return whether the environment says that this process is one of a job, and not its first."""
    try:
        launch = detect(os.environ)
    except UserError:
        return False
    return launch is not None and bool(launch.process_id)
