"""A trial's process for `test_kernel_trial.py`: XLA's side, and a kernel that is right or fails in one way.

The environment variable PAIR chooses it. All else is `bench_peers/turns.py`, on the CPU.
"""

import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ultrascale_jax.cli.bench_peers import turns
from ultrascale_jax.cli.bench_peers.contestant import serve
from ultrascale_jax.cli.bench_peers.works import BF16, MOSAIC, XLA, Work, normals


def product(times: int) -> Callable:
    """Return x @ y, computed so many times in turn."""
    return lambda x, y: jax.lax.fori_loop(0, times, lambda _, z: (x + 0 * z) @ y, x)


def wrong(x, y):
    return product(1)(x, y).at[-1].set(0)


def raises(x, y):
    raise ValueError("no such tile")


def exits(x, y):
    os._exit(3)


def hangs(x, y):
    while True:
        time.sleep(1)


KERNELS = {
    "fast": product(1),
    "slow": product(60),
    "wrong": wrong,
    "nan": lambda x, y: product(1)(x, y) * jnp.nan,
    "raises": raises,
    "exits": exits,
    "hangs": hangs,
}


def pair(M: int, D: int) -> list[Work]:
    sides = {XLA: product(20), MOSAIC: KERNELS[os.environ["PAIR"]]}
    return [
        Work(
            name="pair",
            contestants=tuple(sides),
            on_cpu=tuple(sides),
            make=lambda key: normals(key, (M, D), (D, D)),
            run=lambda name, x, y: sides[name](x, y * D**-0.5),
            limit=BF16,
            amount=2 * M * D * D,
        )
    ]


if __name__ == "__main__":
    turns.LAYER_WORKS["layer_norm"] = pair
    serve(turns.make)
