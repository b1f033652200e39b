"""The check of a kernel passes a right implementation, and notices every kind of wrong one."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ultrascale_jax.cli.kernel_numerics import CHECKS, measure, plain, ring_block
from ultrascale_jax.plan.compiled.compile import target_devices

HEADS = 4, 2, 64

PARTS = {
    "plain": plain(256, *HEADS),
    "window": plain(256, *HEADS, window=64),
    "packed": plain(2048, *HEADS, documents=True),
    "sinks": plain(256, *HEADS, window=64, sinks=True),
    "ring block": ring_block(256, *HEADS),
    "ring block of documents": ring_block(256, *HEADS, documents=True),
    "norm": CHECKS["norm"](256, 256),
    "loss": CHECKS["loss"](256, 128, 512),
    "experts": CHECKS["experts"](512, 4, 128, 128),
    "fp8 product": CHECKS["fp8_product"](256, 128, 384),
}


@pytest.mark.parametrize("name", PARTS)
def test_xlas_version_is_right(name):
    errors = measure(PARTS[name], "auto", jnp.bfloat16)
    assert errors.right and errors.kernel == errors.xla


def spoiled(check, place, index, value):
    """Change one result of an implementation."""

    def run(name, *arguments):
        results = list(check.run("xla", *arguments))
        if name != "xla":
            results[place] = results[place].at[index].set(value)
        return results

    return replace(check, run=run)


def instead(check, other):
    """Compute something else by the implementation."""
    return replace(
        check,
        run=lambda name, *arguments: (check if name == "xla" else other).run("xla", *arguments),
    )


WRONG = {
    "a window of one more": instead(PARTS["window"], plain(256, *HEADS, window=65)),
    "no documents": instead(plain(256, *HEADS, documents=True), PARTS["plain"]),
    "no documents in a block": instead(PARTS["ring block of documents"], PARTS["ring block"]),
    "the last row of a head": spoiled(PARTS["plain"], 0, (0, -1, 0), 0),
    "a gradient of q": spoiled(PARTS["plain"], 1, (0, 0), 1),
    "a gradient of a key": spoiled(PARTS["ring block"], 2, (0, 255), 0),
    "a NaN in a gradient of v": spoiled(PARTS["plain"], 3, (0, 9, 0, 5), jnp.nan),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_of_attention_is_noticed(name):
    assert not measure(WRONG[name], "auto", jnp.bfloat16).right


@pytest.mark.parametrize("name", PARTS)
def test_on_an_h100_the_check_computes_with_the_kernel(name):
    check, attends = PARTS[name], name in list(PARTS)[:6]
    kernel = "dot_product_attention" if attends else "Ref<gmem>"
    with jax.set_mesh(jax.sharding.Mesh(target_devices(1), ("one",))):
        arguments = jax.eval_shape(lambda: check.make(jax.random.key(0), jnp.bfloat16))
        for implementation in ("auto" if attends else "mosaic", "xla"):
            text = str(jax.make_jaxpr(functools.partial(check.run, implementation))(*arguments))
            assert (kernel in text) == (implementation != "xla")
