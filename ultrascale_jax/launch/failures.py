"""End all processes of a job within seconds of the first that fails, and let process 0 print the first cause last.

A process that ends in the ordinary way waits in JAX's shutdown barrier for the others, and they wait in a collective
for it: for ever. So a process that fails leaves at once (`os._exit`), and tells the others why through the key-value
store of JAX's coordinator, where the first to write the key has the first cause. A thread of every process reads the
key, because the main thread may be inside a collective. A process that fails writes a `failure` to `events.jsonl`.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.exit_codes import CRASHED, REFUSED, STOPPED

KEY = "ultrascale/failure"
POLL_S = 0.5
LINGER_S = 2.0
"""Seconds that process 0, which holds the key-value store, stays for the others to read the cause."""

LIMIT_S = 6.0
"""Seconds that a failing process may take to report, at most."""

LONGEST = 20_000
"""Characters of a traceback sent to other processes: its end says most."""

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, as shells give it."""

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""Names of environment variables whose values are removed from all that is written."""

DENIED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
}
"""Errors of a file that last until somebody changes its mode, its owner, its disk, or the file in its place."""


class NotNow(UserError):
    """A disk, a network, a device or a run directory fails or is in use at the moment; a restart may help."""

    exit_code = CRASHED


class Damaged(UserError):
    """A checkpoint cannot be restored as it was saved."""

    exit_code = STOPPED


@dataclass(frozen=True)
class Cause:
    """Why a process fails."""

    rank: int
    host: str
    pid: int
    code: int
    """Exit code of all processes."""
    quiet: bool
    """Whether the summary says all: the user refused something, or pressed Ctrl-C."""
    summary: str
    text: str
    """The traceback."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Cause":
        """Describe `error` of this process, without secrets."""
        error = denied(error) or error
        summary = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, UserError):
            summary = str(error)
        elif isinstance(error, KeyboardInterrupt):
            summary = "interrupted"
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            code=exit_code(error),
            quiet=isinstance(error, UserError | KeyboardInterrupt),
            summary=redact(summary, os.environ)[-2000:],
            text=redact(text, os.environ)[-LONGEST:],
        )


class Store(Protocol):
    """The methods of `jaxlib`'s `DistributedRuntimeClient` that `Failures` uses."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def key_value_try_get(self, key: str) -> str: ...


class Failures:
    """End this process when it fails, and when another one has failed; one instance per process."""

    def __init__(self, rank: int = 0, store: Store | None = None):
        """Watch process `rank` of a job whose processes share `store`, or a single process."""
        self._rank, self._store = rank, store
        self._record: Callable[..., None] | None = None
        self._once = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)

    def start(self) -> None:
        """Catch uncaught exceptions, in any thread, and watch the other processes."""
        sys.excepthook = lambda kind, error, trace: self.fail(error)
        threading.excepthook = self._uncaught_in_thread
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: this process ends in the ordinary way; JAX's client answers no calls while it shuts down."""
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        self._done.set()
        self._thread.join(timeout=10.0)

    @contextlib.contextmanager
    def guarded(
        self, record: Callable[..., None] | None = None, *, refusals: bool = True
    ) -> Iterator[None]:
        """Record by `record` any exception that leaves the block, a failing `SystemExit` too, and end the job with it.

        Without `refusals` a `UserError` passes: the block is inside another one of these, and the code between them
        may wait for other processes, which all raise it.
        """
        self._record = record
        try:
            yield
        except BaseException as error:
            if exit_code(error) != 0 and (refusals or not isinstance(error, UserError)):
                if self._store is not None:
                    self.fail(error)
                if refusals:
                    self._note(Cause.of(error, self._rank), first=True)
            raise

    def fail(self, error: BaseException) -> NoReturn:
        """End this process because of `error`, and all others with it."""
        with self._last_act(exit_code(error)):
            cause = Cause.of(error, self._rank)
            first = self._publish(cause)
            if first in (cause, None) and not cause.quiet:
                say(cause.text, sys.stderr)
            elif first is None and self._rank != 0:
                say(f"error: {cause.summary}", sys.stderr)
            # Last, as the disk may have failed.
            self._note(cause, first=first in (cause, None))
            self._leave(first or cause, cause)

    def _watch(self) -> None:
        """Run in a thread: end this process when another one has failed."""
        while not self._done.wait(POLL_S):
            first = self._read()
            if first is not None and not self._done.is_set():
                with self._last_act(first.code):
                    self._leave(first, None)

    @contextlib.contextmanager
    def _last_act(self, code: int) -> Iterator[None]:
        """End the process after the block, or `LIMIT_S` after its beginning: a disk or the network may hang.

        A second thread that fails waits here for that end.
        """
        if not self._once.acquire(blocking=False):
            threading.Event().wait()
        last = threading.Timer(LIMIT_S, os._exit, (code,))
        last.daemon = True
        last.start()
        try:
            # Flush earlier output, so that it comes first.
            _flush()
            yield
        finally:
            os._exit(code)

    def _leave(self, first: Cause, cause: Cause | None) -> NoReturn:
        """Print the first cause, last on process 0, and leave with its exit code; `cause`: of this process."""
        who = f"rank {first.rank} ({first.host}, pid {first.pid})"
        if self._rank == 0:
            if first != cause and not first.quiet:
                say(first.text, sys.stderr)
            # Give the others time to read the key, and print the first cause last.
            time.sleep(LINGER_S)
            same = cause is not None and cause.summary == first.summary
            refused = "error" if same else f"error of {who}"
            intro = refused if first.quiet else f"first cause: {who}"
            say(f"{intro}: {first.summary}", sys.stderr)
        elif first != cause and not first.quiet:
            text = f"rank {self._rank} ends, because {who} failed first: {first.summary}"
            say(text, sys.stderr)
        _flush()
        os._exit(first.code)

    def _publish(self, cause: Cause) -> Cause | None:
        """Return the first cause, `cause` if no other process was quicker; None if the coordinator is gone."""
        assert self._store is not None
        try:
            self._store.key_value_set(KEY, json.dumps(dataclasses.asdict(cause)))
        except Exception:  # It is there already, or there is no coordinator.
            return self._read()
        return cause

    def _read(self) -> Cause | None:
        assert self._store is not None
        try:
            return Cause(**json.loads(self._store.key_value_try_get(KEY)))
        except Exception:
            return None

    def _note(self, cause: Cause, *, first: bool) -> None:
        """Write the event, except if the run refuses to begin: that run directory may be another job's."""
        if self._record is not None and cause.code != REFUSED:
            summary, trace = cause.summary, cause.text
            self._record("failure", summary=summary, traceback=trace, code=cause.code, first=first)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or isinstance(error, SystemExit):
            threading.__excepthook__(args)
        else:
            self.fail(error)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Somebody may have closed the other end.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def denied(error: BaseException) -> UserError | None:
    """Return the refusal of a file whose error lasts until somebody fixes it; None for another error."""
    if isinstance(error, UserError) or not isinstance(error, OSError):
        return None
    if error.errno not in DENIED or error.filename is None:
        return None
    fix = "give this user a place to write (chmod, chown), or choose another"
    return UserError(f"{error.filename}: {error.strerror}; {fix}")


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that `error` ends."""
    error = denied(error) or error
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        return 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, UserError) else CRASHED


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` without the values of environment variables that are secrets by their names."""
    for name, value in environ.items():
        if SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, f"<{name}>")
    return text
