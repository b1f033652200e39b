"""The contestant's side of a benchmark: make the first step, then as many more as the parent asks for.

The parent (`runner.py`) starts a contestant with its specification, JSON, as the argument. The contestant answers on
its standard output, one JSON object a line: first when it has made a step, then for each line of standard input, which
holds a number of steps. In between it sleeps, so several can take turns on one core. Whatever else it prints goes to
standard error, and it ends when its input does, or its parent dies.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

from ultrascale_jax.launch.processes import follow_supervisor


class Unavailable(Exception):
    """This contestant cannot run here; the message says why."""


def moment() -> tuple[float, float]:
    """Return the time of day and the CPU time that this process has used, in seconds."""
    return time.time(), time.process_time()


Limit = Literal["copy", "bf16 GEMM", "fp8 GEMM"]
"""The work of the `roofline` that bounds a work."""


@dataclass(frozen=True)
class Program:
    """One of several programs in one process that take turns (`turns.py`)."""

    work: str
    """Name of the work; the first program of a work is the one that the others are compared with."""
    contestant: str
    amount: int
    """Operations of one call, or least bytes of traffic where `limit` is `copy`."""
    limit: Limit
    copies: int
    """Times that its function does it, each with arguments of its own."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of its row in the report, beside times."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A training run after its first step."""

    run: Callable[[int], list[float]]
    """Makes so many steps and returns the seconds of each, all of them finished."""
    peak_bytes: Callable[[], int]
    """Largest memory in use so far: of the device, or on a CPU of the process."""
    compile_s: float
    loss: float | None = None
    """Loss of the first step, in nats; none where nothing is trained."""
    first_step: tuple[float, float] = field(default_factory=moment)
    """`moment()` when the first step was done: now, unless it is given."""
    device: str
    libraries: tuple[str, ...]
    """Distributions whose versions are reported."""
    notes: dict[str, str] = field(default_factory=dict)
    """Other properties that distinguish the run."""
    programs: tuple[Program, ...] = ()
    """Programs that take turns, if any: step i is that of program i % len(programs)."""


def serve(make: Callable[[dict], Contestant]) -> None:
    """Run the contestant that `make` makes of the specification in `sys.argv`."""
    follow_supervisor(os.environ)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers)

    try:
        contestant = make(json.loads(sys.argv[1]))
        some = {"loss": contestant.loss, "programs": [asdict(one) for one in contestant.programs]}
        answer(
            compile_s=contestant.compile_s,
            **{name: value for name, value in some.items() if value not in (None, [])},
            first_step=contestant.first_step,
            device=contestant.device,
            versions={name: importlib.metadata.version(name) for name in contestant.libraries},
            notes=contestant.notes,
        )
        for line in sys.stdin:
            begun = time.process_time()
            step_s = contestant.run(int(line))
            cpu_s = time.process_time() - begun
            answer(step_s=step_s, cpu_s=cpu_s, peak_bytes=contestant.peak_bytes())
    except Unavailable as reason:
        answer(skipped=str(reason))
    except Exception as error:  # Whatever it is, the parent reports it and goes on with the others.
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


def pipelined[Handle](
    step: Callable[[], Handle], wait: Callable[[Handle], object], num_steps: int
) -> list[float]:
    """Return the seconds of each of `num_steps` steps; as in training, each is dispatched before the last one ends."""
    times, begun = [], time.perf_counter()
    pending = step()
    for n in range(num_steps):
        following = step() if n + 1 < num_steps else pending
        wait(pending)
        done = time.perf_counter()
        times.append(done - begun)
        begun, pending = done, following
    return times


def resident_bytes() -> int:
    """Return the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_bytes() -> int:
    """Return the most memory that JAX's first device has held; on a CPU, that this process has."""
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use") or resident_bytes()


def require_gpu(spec: dict) -> None:
    """Set XLA's flags; fail if the specification needs a GPU and JAX has none."""
    import jax

    from ultrascale_jax.launch import distributed

    distributed.set_environment(os.environ)
    if spec["needs_gpu"] and jax.default_backend() != "gpu":
        raise Unavailable(f"JAX sees no GPU, only {jax.default_backend()}")
