"""The scan that gathers ahead computes what a plain scan computes, and so do its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.config.lowering import Delay, Lowering
from ultrascale_jax.parallel.prefetch import Layer, prefetch_scan
from ultrascale_jax.sharding.mesh import make_mesh

B, D = 4, 8


def gather(params, constant):
    """Matrices whole over fsdp, and an integer that has no gradient."""
    whole = P(None, None, reduced=frozenset({"fsdp"}))
    return {name: jax.reshard(p, whole) for name, p in params.items()} | {"constant": constant}


def gather_and_sum(params, constant):
    """The same with gradients that are summed over dp, too: by the transpose of `leave_sums`, or of this."""
    whole = P(None, None, reduced=frozenset({"dp", "fsdp"}))
    left = leave_sums(params)
    return {name: jax.reshard(p, whole) for name, p in left.items()} | {"constant": constant}


def leave_sums(params):
    left = P("fsdp", None, reduced=frozenset({"dp"}))
    return {name: jax.reshard(p, left) for name, p in params.items()}


def run(gathered, x, context, constant):
    spec = jax.typeof(x).sharding.spec
    product = functools.partial(jnp.einsum, "bd,de->be", out_sharding=spec)
    y = product(product(x, gathered["up"]), gathered["down"]) + gathered["constant"] * x + constant
    y = checkpoint_name(y, "y")
    return x + jnp.tanh(y) * context, jnp.sum(jnp.square(y), axis=1), jnp.max(y, axis=1)


def plain_scan(layer, params, constants, x, context):
    def body(x, row):
        y, *out = layer.run(layer.gather(*row), x, context, row[1])
        return y, tuple(out)

    return jax.lax.scan(body, x, (params, constants))


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize(
    ("lowering", "dp", "offload"),
    [
        (Lowering(), 1, ()),
        (Lowering(copies_rows=True, bounds_written_rows=True), 1, ("y",)),
        (Lowering(unrolls=True, delay=Delay("down", ("down",), scatters=False)), 1, ()),
        (Lowering(unrolls=True, delay=Delay("down", None, scatters=True)), 1, ()),
        (Lowering(unrolls=True, copies_rows=True), 2, ()),
    ],
)
def test_values_and_gradients_are_those_of_a_plain_scan(num, lowering, dp, offload):
    keys = jax.random.split(jax.random.key(0), 4)
    split = "fsdp" if dp == 1 else ("dp", "fsdp")
    with jax.set_mesh(make_mesh(MeshConfig(dp=dp, fsdp=2), jax.devices()[: 2 * dp])):
        params = {
            name: jax.random.normal(key, (num, D, D), out_sharding=P(None, "fsdp", None))
            for name, key in zip(("up", "down"), keys[2:], strict=True)
        }
        x = jax.random.normal(keys[1], (B, D), out_sharding=P(split, None))
        constants, context = jnp.arange(num), jnp.float32(0.7)
        weights = jax.random.normal(keys[0], (num, B), out_sharding=P(None, split))
        layer = Layer(gather, run) if dp == 1 else Layer(gather_and_sum, run, leave_sums)

        def value_and_grad(scan, **how):
            def loss(params, x):
                y, (aux, statistics) = scan(layer, params, constants, x, context, **how)
                return jnp.sum(jnp.sin(y)) + jnp.sum(aux * weights), statistics

            return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

        found = value_and_grad(prefetch_scan, lowering=lowering, offload=offload)
        expected = value_and_grad(plain_scan)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
