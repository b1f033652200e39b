"""The process of the tests of `cli/kernel_check.py`, with checks of kernels that fail in one way each."""

import os
import sys
import time

import jax.numpy as jnp

from ultrascale_jax.cli.kernel_check import serve
from ultrascale_jax.cli.kernel_numerics import CHECKS, Check, normals


def raises(y):
    raise ValueError("no such tile")


def lacks_memory(y):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def exits(y):
    os._exit(3)


def hangs(y):
    while True:
        time.sleep(1)


KERNELS = {
    "right": lambda y: y,
    "wrong": lambda y: y.at[-1].set(0),
    "nan": lambda y: y.at[0, 0].set(jnp.nan),
    "raises": raises,
    "lacks_memory": lacks_memory,
    "exits": exits,
    "hangs": hangs,
}


def product(kind: str):
    def check(M: int, D: int) -> Check:
        def make(key, dtype):
            return normals(key, (M, D), (D, D), dtype=dtype)

        def run(name, x, y):
            return ((x @ y) if name == "xla" else KERNELS[kind](x @ y),)

        return Check(make, run)

    return check


if __name__ == "__main__":
    CHECKS.update({kind: product(kind) for kind in KERNELS})
    serve(sys.argv[1:])
