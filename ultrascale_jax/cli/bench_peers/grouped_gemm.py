"""The experts' grouped matrix products: the kernel and the padded reference of this project beside `lax.ragged_dot`.

Rows are as many as a device gets, in groups of uneven sizes as a router makes them. The programs take turns
(`turns.py`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    Program,
    Unavailable,
    require_gpu,
    serve,
)
from ultrascale_jax.cli.bench_peers.turns import difference, normals, take_turns
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul, mosaic_applies

WORKS = ("forward", "input gradient", "weight gradient")

KERNEL, PADDED, RAGGED = "grouped_matmul, mosaic", "grouped_matmul, xla", "lax.ragged_dot"

SPREAD = 0.3
"""Standard deviation of the logarithm of an expert's share of the rows."""


def programs(spec: dict) -> tuple[Program, ...]:
    """In the order of their turns; the kernel only where there is a GPU."""
    names = (RAGGED, PADDED, KERNEL) if spec["needs_gpu"] else (RAGGED, PADDED)
    flops = 2 * spec["rows"] * spec["d_model"] * spec["d_ff"]
    return tuple(Program(work, name, flops) for work in WORKS for name in names)


def functions(spec: dict) -> dict[Program, Callable]:
    """Each program's function of x, w, the sizes and y's cotangent; it returns a tuple of one array."""

    def ours(implementation: str) -> Callable:
        return lambda *arrays: grouped_matmul(*arrays, implementation=implementation)

    products = {KERNEL: ours("mosaic"), PADDED: ours("xla"), RAGGED: jax.lax.ragged_dot}

    def function(program: Program) -> Callable:
        multiply = products[program.contestant]
        if program.work == "forward":
            return lambda x, w, sizes, dy: (multiply(x, w, sizes),)
        if program.work == "input gradient":
            return lambda x, w, sizes, dy: jax.vjp(lambda x: multiply(x, w, sizes), x)[1](dy)
        return lambda x, w, sizes, dy: jax.vjp(lambda w: multiply(x, w, sizes), w)[1](dy)

    return {program: function(program) for program in programs(spec)}


def arrays(spec: dict) -> tuple:
    """x, w, the sizes, whose sum is the number of rows, and y's cotangent."""
    R, E, D, F = (spec[name] for name in ("rows", "experts", "d_model", "d_ff"))
    shares = np.exp(SPREAD * np.random.default_rng(0).normal(size=E))
    ends = np.round(R * np.cumsum(shares) / np.sum(shares)).astype(np.int32)
    sizes = jnp.asarray(np.diff(ends, prepend=0), jnp.int32)

    x, w, dy = jax.jit(lambda: normals(jax.random.key(0), (R, D), (E, D, F), (R, F)))()
    return x, w, sizes, dy


def make(spec: dict) -> Contestant:
    require_gpu(spec)
    x, w, sizes, dy = arrays(spec)
    if spec["needs_gpu"] and not mosaic_applies(x, w):
        raise Unavailable("the kernel needs an H100 or H200")

    def notes(results: dict[Program, tuple], _) -> dict[str, str]:
        theirs = {p.work: result for p, result in results.items() if p.contestant == RAGGED}
        return {
            f"{p.work}: {p.contestant} differs by": difference(result, theirs[p.work])
            for p, result in results.items()
            if p.contestant != RAGGED
        }

    given = dict.fromkeys(programs(spec), (x, w, sizes, dy))
    return take_turns(functions(spec), given, spec["calls"], notes)


if __name__ == "__main__":
    serve(make)
