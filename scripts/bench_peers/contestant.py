"""The contestant's side of a benchmark: make the first step, then run as many as the parent asks for.

The parent (`scripts/bench.py`) starts a contestant with its specification as the argument. The contestant answers on its
standard output in JSON, one object a line: once when its first step is done, then for each line of standard input, which
holds a number of steps. Between two lines it sleeps, so several contestants take turns on one core. Everything else that
it prints goes to standard error, and it ends when its input does.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A training run after its first step."""

    run: Callable[[int], list[float]]
    """Makes so many steps and returns the seconds that each took, all of them finished."""
    peak_bytes: Callable[[], int]
    """Largest memory in use so far: the device's, or on a CPU the process's."""
    compile_s: float
    """Seconds spent compiling the step."""
    loss: float
    """Loss of the first step, in nats."""
    device: str
    """Kind of the device."""
    libraries: tuple[str, ...]
    """Distributions whose versions are reported."""
    notes: dict[str, str]
    """What else it chose."""


def serve(make: Callable[[dict], Contestant]) -> None:
    """Be the contestant that `make` makes of the specification in `sys.argv`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers)

    try:
        contestant = make(json.loads(sys.argv[1]))
        answer(
            compile_s=contestant.compile_s,
            loss=contestant.loss,
            device=contestant.device,
            versions={name: importlib.metadata.version(name) for name in contestant.libraries},
            notes=contestant.notes,
        )
        for line in sys.stdin:
            cpu_s = time.process_time()
            times = contestant.run(int(line))
            cpu_s = time.process_time() - cpu_s
            answer(step_s=times, cpu_s=cpu_s, peak_bytes=contestant.peak_bytes())
    except Exception as error:  # Whatever it is, the parent reports it and goes on with the others.
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}".strip())
        sys.exit(1)


def resident_bytes() -> int:
    """Largest memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def pipelined(
    step: Callable[[], object], wait: Callable[[object], object], num_steps: int
) -> list[float]:
    """Seconds of each of `num_steps` steps, the next one always dispatched before the last is waited for."""
    times, pending, begun = [], step(), time.perf_counter()
    begun_first = begun
    for n in range(num_steps):
        following = step() if n + 1 < num_steps else None
        wait(pending)
        done = time.perf_counter()
        times.append(done - begun)
        begun, pending = done, following
    del begun_first
    return times
