"""Measure a part of a benchmark in a process of its own, so that no part shares a device or a cache with another.

The process gets its specification as JSON, and its last line of standard output is its rows, or why it has none.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OUT_OF_MEMORY = ("resource_exhausted", "out of memory")

type Rows = list[dict[str, Any]]


class Unavailable(Exception):
    """This part cannot run here, or has no time left; the message says why."""


class Failed(Exception):
    """A part ended with an error."""

    @property
    def out_of_memory(self) -> bool:
        """Return whether a setting that needs less memory could work."""
        return any(words in str(self).lower() for words in OUT_OF_MEMORY)


def run(module: str, spec: Mapping[str, Any], environ: Mapping[str, str], seconds: float) -> Rows:
    """Return the rows of `python -m module SPEC`. Raises `Unavailable`, also after so many `seconds`, or `Failed`."""
    if seconds <= 0:
        raise Unavailable("the benchmark's time was over")
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(spec)],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable("the benchmark's time was up") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failed(f"ended with code {done.returncode}: {last}"[:500])
    answer = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in answer:
        raise Unavailable(answer["skipped"])
    if "error" in answer:
        raise Failed(answer["error"])
    return answer["rows"]


def serve(measure: Callable[[dict[str, Any]], Rows]) -> None:
    """Print the rows that `measure` returns for the specification in `sys.argv`."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer: dict[str, Any] = {"rows": measure(json.loads(sys.argv[1]))}
    except Unavailable as reason:
        answer = {"skipped": str(reason)}
    except (
        Exception
    ) as error:  # Whatever it is, the parent reports it and measures the other parts.
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(answer))


def require_gpu(spec: Mapping[str, Any]) -> None:
    """Set XLA's flags; raise `Unavailable` if the specification needs a GPU and JAX has none."""
    import jax

    from ultrascale_jax.launch import distributed

    distributed.set_environment(os.environ)
    if spec["needs_gpu"] and jax.default_backend() != "gpu":
        raise Unavailable(f"JAX sees no GPU, only {jax.default_backend()}")


@contextlib.contextmanager
def one_core() -> Iterator[int]:
    """Run processes that are started in this block on one core, and yield its number."""
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, cores)
