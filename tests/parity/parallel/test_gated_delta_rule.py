"""The gated delta rule over ranks that share a sequence and its heads, beside the token-by-token oracle in float64."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from tests.delta_oracle import oracle, random_arrays, relative_errors
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.parallel.gated_delta_rule import DIMS, gated_delta_rule
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.sharding.sequence_order import sequence_order

AXES = ("fsdp", "cp", "sp", "tp")
DOCUMENTS = 0.08
"""Share of the tokens with which a document begins."""


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


@pytest.mark.parametrize(
    ("sizes", "context", "tokens", "documents", "inside", "delta"),
    [
        ((1, 4, 1, 2), ContextConfig(strategy="zigzag"), 4 * 11, True, False, True),
        ((2, 2, 1, 2), ContextConfig(strategy="ring"), 2 * 20, False, False, True),
        ((1, 2, 2, 2), ContextConfig(strategy="allgather"), 2 * 17, True, True, True),
        ((1, 6, 1, 1), ContextConfig(strategy="zigzag", ulysses=3), 6 * 7, True, False, True),
        ((1, 4, 1, 2), ContextConfig(strategy="zigzag"), 4 * 11, True, False, False),
        ((1, 2, 2, 2), ContextConfig(strategy="ring"), 2 * 17, True, True, False),
    ],
    ids=["zigzag", "ring", "inside", "ulysses_of_3", "mamba_zigzag", "mamba_inside"],
)
def test_ranks_equal_the_oracle(sizes, context, tokens, documents, inside, delta):
    """Also called in a region that is manual over all axes, as of a pipeline."""
    arrays = random_arrays(0, T=tokens, K=4, N=8, W=4, decay=0.01)
    rng = np.random.default_rng(1)
    cotangent = rng.standard_normal(arrays[2].shape).astype(np.float32)
    begins = rng.uniform(size=(2, tokens)) < DOCUMENTS
    ids = np.cumsum(begins, axis=1).astype(np.int32) if documents else None
    order = sequence_order(tokens, sizes[1], context)
    want = jax.tree.map(lambda x: x[:, order], oracle(arrays, ids, cotangent, delta))
    mesh = mesh_of(*sizes)

    def both(arrays, ids, cotangent):
        options = {"context": context, "chunk": 4, "delta": delta}
        out, pull_back = jax.vjp(lambda *x: gated_delta_rule(*x, ids, **options), *arrays)
        return out, pull_back(cotangent)

    with jax.set_mesh(mesh):
        specs = [*map(act, DIMS)], None if ids is None else act("BT"), act("BTNW")
        arguments = jax.tree.map(
            lambda x, spec: jax.device_put(x[:, order], NamedSharding(mesh, spec)),
            (arrays, ids, cotangent),
            specs,
        )
        out_specs = act("BTNW"), tuple(specs[0])
        run = smap(both, in_specs=specs, out_specs=out_specs) if inside else both
        got = jax.device_get(jax.jit(run)(*arguments))
    assert max(relative_errors(got, want)) < 1e-5
