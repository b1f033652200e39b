"""The order of two functions whose exchanges hide behind each other's products; rows of parity have the results."""

import jax
import jax.numpy as jnp
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


def test_while_rows_of_one_travel_the_other_computes():
    def region(x, y, w):
        results = interleave((there_and_back(w), x), (there_and_back(w), y))
        return jax.tree.map(jnp.atleast_1d, results)

    mesh, specs = make_mesh(MeshConfig(ep=8, fsdp=1)), (P("ep"), P("ep"), P())
    arrays = [
        jax.ShapeDtypeStruct((D, D), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for spec in specs
    ]
    with jax.set_mesh(mesh):
        run = smap(region, in_specs=specs, out_specs=P("ep"))
        order = list(equations(jax.make_jaxpr(run)(*arrays).jaxpr))
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
