"""The parent's side of a benchmark: start contestants, let them take turns, stop them by the clock.

Each contestant is a process of its own, so that none shares a device, a thread pool or a compilation cache with
another, and what one costs to start is seen whole. See `contestant.py` for what is said between the two.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from ultrascale_jax.cli.bench_peers.contestant import Unavailable
from ultrascale_jax.launch.processes import SUPERVISOR

OUT_OF_MEMORY = ("resource_exhausted", "out of memory")


class Failed(Exception):
    """A contestant ended with an error; the message is its last words."""

    @property
    def out_of_memory(self) -> bool:
        """Return whether a setting that needs less memory could work."""
        return any(words in str(self).lower() for words in OUT_OF_MEMORY)


class OutOfTime(Exception):
    """A contestant was stopped because the benchmark's time is up."""


class Process:
    """One contestant, started and past its first step once `ready` has returned."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environ: Mapping[str, str],
        deadline: float,
    ):
        """Start `python -m module ARGUMENTS`; it is killed at `deadline` (of `time.monotonic`)."""
        self._late = False
        self._log = tempfile.TemporaryFile(mode="w+")
        self._cache = tempfile.TemporaryDirectory()
        self._started = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                **environ,
                "TORCHINDUCTOR_CACHE_DIR": self._cache.name,
                SUPERVISOR: str(os.getpid()),
            },
            # An interrupt from the terminal goes to the parent alone, which then ends its children.
            start_new_session=True,
        )
        self._timer = threading.Timer(max(deadline - time.monotonic(), 0.0), self._kill_late)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()
        self._cache.cleanup()

    def ready(self) -> dict:
        """Wait for the first step; return the contestant's facts, with seconds and CPU-seconds since its start."""
        answer = self._read()
        at, cpu_s = answer.pop("first_step")
        return answer | {"first_step_s": at - self._started, "first_step_cpu_s": cpu_s}

    def run(self, num_steps: int) -> dict:
        """Let it make steps; return `step_s` of each, `cpu_s` of all together, `peak_bytes` so far."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        return self._read()

    def wait_for(self, done: Callable[[], bool]) -> float:
        """Wait until `done()`; return the seconds since the start."""
        while self._process.poll() is None and not done():
            time.sleep(0.01)
        if not done():
            raise self._end()
        return time.time() - self._started

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if self._late or not line:
            raise self._end()
        answer = json.loads(line)
        if "skipped" in answer:
            raise Unavailable(answer["skipped"])
        if "error" in answer:
            raise Failed(answer["error"][:500])
        return answer

    def _end(self) -> OutOfTime | Failed:
        """Return why the process ended, once it has."""
        code = self._process.wait()
        if self._late:
            return OutOfTime("the benchmark's time was up")
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return Failed(f"ended with code {code}: {lines[-1] if lines else 'no message'}"[:500])

    def _kill_late(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        """End the process with its children (PyTorch compiles in several)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def one_core() -> Iterator[int | None]:
    """Run processes started in this block on one core, and yield its number; None if the system cannot pin them."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, cores)
