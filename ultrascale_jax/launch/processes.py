"""Start the processes of one host, forward their output, kill them.

Each is the leader of its own process group, so Ctrl-C reaches the supervisor alone, and dies with its supervisor.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence

SUPERVISOR = "ULTRASCALE_SUPERVISOR"
"""Environment variable that tells a process the id of its supervisor."""

NOISE = b"[Gloo] Rank "
"""Start of the lines that gloo writes for every set of communicating devices."""


class Child:
    """One process."""

    def __init__(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], *, plain: bool
    ):
        """Start process `rank` of the job; its output gets its rank in front, unless `plain`."""
        self.rank = rank
        self.process = subprocess.Popen(
            command,
            env={**environ, SUPERVISOR: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=None if plain else subprocess.PIPE,
            stderr=None if plain else subprocess.STDOUT,
            process_group=0,
        )
        self._pump = None if plain else threading.Thread(target=self._forward_output, daemon=True)
        if self._pump is not None:
            self._pump.start()

    @property
    def code(self) -> int | None:
        """None while it lives, negative where a signal killed it."""
        return self.process.poll()

    @property
    def was_killed(self) -> bool:
        """Return whether a signal of another process ended it, rather than its own abort()."""
        code = self.code or 0
        return code < 0 and code != -signal.SIGABRT

    @property
    def exit_code(self) -> int:
        """Exit code as a shell gives it, 128 plus the number of the signal; 0 while the process lives."""
        code = self.code or 0
        return 128 - code if code < 0 else code

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def drain_output(self) -> None:
        """Wait until all it has printed is passed on."""
        if self._pump is not None:
            self._pump.join(timeout=5.0)

    def _forward_output(self) -> None:
        assert self.process.stdout is not None
        prefix = f"[{self.rank}] ".encode()
        with self.process.stdout as lines:
            for line in lines:
                if not line.startswith(NOISE):
                    # One write a line, so that lines of several processes do not mix. A process whose lines nobody
                    # takes would wait for ever, so they are taken though they cannot be passed on.
                    with contextlib.suppress(OSError):
                        sys.stdout.buffer.write(prefix + line)
                        sys.stdout.buffer.flush()


def kill(children: Sequence[Child]) -> None:
    """End them at once, and wait until they are gone."""
    for child in children:
        child.signal(signal.SIGKILL)
    for child in children:
        # One in a disk's wait that cannot be interrupted stays.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=10.0)


def follow_supervisor(environ: MutableMapping[str, str]) -> None:
    """End this process when its supervisor dies; takes the variable out of `environ`, which children inherit."""
    supervisor = environ.pop(SUPERVISOR, "")
    if not supervisor.isdecimal() or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # It may have died before.
    if os.getppid() != int(supervisor):
        os.kill(os.getpid(), signal.SIGKILL)
