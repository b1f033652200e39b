"""Several programs in one process that take turns, step by step, so that they meet the same clock of the GPU.

Step i is that of program `i % len(programs)`, and makes `spec["calls"]` calls. Each program does a work that others do
too; the first of the same work is what the others are compared with.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    Program,
    device_bytes,
    moment,
    pipelined,
)


def take_turns(
    functions: Mapping[Program, Callable],
    given: Mapping[Program, tuple],
    calls: int,
    notes: Callable[[dict[Program, tuple], dict[Program, Any]], dict[str, str]],
) -> Contestant:
    """Compile all programs and call each once.

    Args:
      functions: each program's function.
      given: its arguments.
      calls: calls of a step.
      notes: what to report of all programs' results, and of the compiled programs.
    """
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

    return Contestant(
        run=lambda n: pipelined(step, jax.block_until_ready, n),
        peak_bytes=device_bytes,
        compile_s=compile_s,
        first_step=moment(),
        device=jax.devices()[0].device_kind,
        libraries=("jax", "jaxlib"),
        notes=found,
        programs=tuple(functions),
    )


def difference(ours: tuple, theirs: tuple) -> str:
    """Largest difference of any result from theirs, as a share of that result's largest value."""

    @jax.jit
    def largest(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))

    return f"{max(float(largest(x, y)) for x, y in zip(ours, theirs, strict=True)):.1e}"


def normals(key: jax.Array, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Random bfloat16 arrays."""
    keys = jax.random.split(key, len(shapes))
    return tuple(
        jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)
    )
