"""Several programs in one process that take turns, step by step, so that they meet the same clock of the GPU.

Step i is that of program `i % len(programs)`, and makes `spec["calls"]` calls. Each program does a work that others do
too; the first of the same work is what the others are compared with.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    Unavailable,
    moment,
    pipelined,
    resident_bytes,
)


class Program(Protocol):
    """One of the programs."""

    @property
    def work(self) -> str:
        """What it does."""
        ...

    @property
    def contestant(self) -> str:
        """Who does it."""
        ...

    @property
    def copies(self) -> int:
        """How often its function does it."""
        ...


def require_gpu(spec: dict) -> None:
    """Set XLA's flags; fail if the specification needs a GPU and there is none."""
    import jax

    from ultrascale_jax.launch import distributed

    distributed.set_environment(os.environ)
    if spec["needs_gpu"] and jax.default_backend() != "gpu":
        raise Unavailable(f"JAX sees no GPU, only {jax.default_backend()}")


def take_turns[P: Program](
    functions: Mapping[P, Callable],
    given: Mapping[P, tuple],
    calls: int,
    notes: Callable[[dict[P, tuple], dict[P, Any]], dict[str, str]],
) -> Contestant:
    """Compile all programs and call each once.

    Args:
      functions: each program's function.
      given: its arguments.
      calls: calls of a step.
      notes: what to report of all programs' results, and of the compiled programs.
    """
    import jax

    begun = time.perf_counter()
    lowered = [jax.jit(function).lower(*given[program]) for program, function in functions.items()]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    compile_s = time.perf_counter() - begun
    by_program = dict(zip(functions, compiled, strict=True))
    found = notes(
        {program: run(*given[program]) for program, run in by_program.items()}, by_program
    )
    turns = itertools.cycle(by_program.items())

    def step() -> object:
        done, (program, run) = None, next(turns)
        for _ in range(calls):
            done = run(*given[program])
        return done

    def peak_bytes() -> int:
        statistics = jax.local_devices()[0].memory_stats() or {}
        return statistics.get("peak_bytes_in_use") or resident_bytes()

    return Contestant(
        run=lambda n: pipelined(step, jax.block_until_ready, n),
        peak_bytes=peak_bytes,
        compile_s=compile_s,
        first_step=moment(),
        device=jax.devices()[0].device_kind,
        libraries=("jax", "jaxlib"),
        notes=found,
    )


def difference(ours: tuple, theirs: tuple) -> str:
    """Largest difference of any result from theirs, as a share of that result's largest value."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def largest(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))

    return f"{max(float(largest(x, y)) for x, y in zip(ours, theirs, strict=True)):.1e}"
