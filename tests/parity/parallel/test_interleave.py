"""The order of two functions whose exchanges hide behind each other's products, and that it changes no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.jaxprs import equations
from ultrascale_jax.config import MeshConfig
from ultrascale_jax.parallel.pipeline.interleave import interleave
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh

D = 512


def exchange(x):
    return lax.all_to_all(x, "ep", 0, 0, tiled=True)


def there_and_back(w):
    """Send rows, multiply them elsewhere and take them back, with a product before and behind."""

    def run(x):
        x = jnp.tanh(x @ w)
        return x + exchange(jnp.tanh(exchange(x) @ w @ w)) @ w, jnp.sum(x)

    return run


def inputs():
    rng = np.random.default_rng(0)
    x, y, w = (rng.normal(size=(D, D)).astype(np.float32) / 16 for _ in range(3))
    return *(jax.device_put(a, P("ep")) for a in (x, y)), w


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(MeshConfig(ep=8, fsdp=1))):
        yield


def on_ranks(function):
    """Make a function of two activations and a matrix one of all ranks."""

    def region(x, y, w):
        return jax.tree.map(jnp.atleast_1d, function(x, y, w))

    return jax.jit(smap(region, in_specs=(P("ep"), P("ep"), P()), out_specs=P("ep")))


def side_by_side(x, y, w):
    return interleave((there_and_back(w), x), (there_and_back(w), y))


def test_the_results_are_those_of_the_functions_alone():
    got = on_ranks(side_by_side)(*inputs())
    want = on_ranks(lambda x, y, w: [there_and_back(w)(a) for a in (x, y)])(*inputs())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_while_rows_of_one_travel_the_other_computes():
    order = list(equations(jax.make_jaxpr(on_ranks(side_by_side))(*inputs()).jaxpr))
    sent = [n for n, eqn in enumerate(order) if eqn.primitive.name == "all_to_all"]
    names = [eqn.primitive.name for eqn in order]
    # One barrier in front of each exchange and one in front of its first reader, a product between the two; but the
    # last exchange, with which everything else is done.
    read = []
    for n in sent:
        (result,) = order[n].outvars
        read.append(next(m for m, eqn in enumerate(order) if result in eqn.invars))
        assert names[n - 1] == names[read[-1]] == "optimization_barrier"
    between = ["dot_general" in names[n:m] for n, m in zip(sent, read, strict=True)]
    assert len(sent) == 4
    assert all(between[:-1])
