"""The embedding's look-up is that of the whole table, also where ZeRO and the tensor group cannot both split it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.primitives import embed_lookup
from ultrascale_jax.sharding.rules import act, stored_spec


@pytest.mark.parametrize("columns", [16, 12])
def test_words_and_their_gradients_are_those_of_the_whole_table(columns):
    """Four ranks of ZeRO and two of the tensor group divide 16 columns; each alone divides 12."""
    rng = np.random.default_rng(0)
    table, weights = rng.normal(size=(8, columns)), rng.normal(size=(4, 6, columns))
    tokens = rng.integers(0, 8, (4, 6), np.int32)

    @jax.jit
    def run(table, tokens, weights):
        def total(table):
            x_BRD = embed_lookup(table, tokens, jnp.float32, {})
            return jnp.sum(x_BRD * weights), x_BRD

        return jax.grad(total, has_aux=True)(table)

    with jax.set_mesh(mesh := make_mesh(MeshConfig(fsdp=4, sp=2))):
        specs = stored_spec("VD", table.shape), act("BT"), act("BRD")
        given = (table.astype(np.float32), tokens, weights.astype(np.float32))
        places = [NamedSharding(mesh, spec) for spec in specs]
        gradient, x_BRD = run(*map(jax.device_put, given, places))
    np.testing.assert_array_equal(x_BRD, given[0][tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
