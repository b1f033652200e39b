"""A kernel that is asked for fails loudly where it cannot run: without a GPU, and for arrays that it does not take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultrascale_jax.kernels.attention import attention
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul
from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy
from ultrascale_jax.kernels.rms_norm import rms_norm


def halves(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


QUERIES, KEYS, SIZES = halves(1, 128, 2, 64), halves(1, 128, 1, 64), numbers(1)
# name: (the function, arrays that its kernel takes, others of which each has one fault)
KERNELS = {
    "attention": (
        functools.partial(attention, q_index=np.arange(128)),
        (QUERIES, KEYS, KEYS),
        [
            (floats(1, 128, 2, 64), floats(1, 128, 1, 64), floats(1, 128, 1, 64)),
            (halves(1, 128, 2, 32), halves(1, 128, 1, 32), halves(1, 128, 1, 32)),
            (QUERIES, halves(1, 64, 1, 64), halves(1, 64, 1, 64)),
        ],
    ),
    "norm": (
        functools.partial(rms_norm, eps=1e-3),
        (halves(4, 256), floats(256)),
        [
            (halves(4, 200), floats(200)),
            (floats(4, 256), floats(256)),
            (halves(4, 256), halves(256)),
        ],
    ),
    "loss": (
        linear_cross_entropy,
        (halves(128, 64), halves(64, 256), numbers(128)),
        [
            (halves(64, 64), halves(64, 256), numbers(64)),
            (halves(128, 64), halves(64, 252), numbers(128)),
            (floats(128, 64), halves(64, 256), numbers(128)),
        ],
    ),
    "grouped_matmul": (
        grouped_matmul,
        (halves(8, 128), halves(128, 1, 128), SIZES),
        [
            (halves(7, 128), halves(128, 1, 128), SIZES),
            (halves(8, 128), halves(128, 1, 64), SIZES),
            (floats(8, 128), halves(128, 1, 128), SIZES),
        ],
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_forced_mosaic_fails_loudly_where_it_cannot_run(name, h100s):
    function, right, wrong = KERNELS[name]
    run = functools.partial(function, implementation="mosaic")
    with pytest.raises(ValueError, match=rf"kernels\.{name}='mosaic'.*got cpu"):
        jax.eval_shape(run, *right)
    with jax.sharding.use_abstract_mesh(h100s.abstract_mesh):
        jax.eval_shape(run, *right)
        for arrays in wrong:
            with pytest.raises(ValueError, match=rf"kernels\.{name}='mosaic'.*got NVIDIA H100"):
                jax.eval_shape(run, *arrays)
