"""The speeds by which a pipeline's passes are ordered: those of the GPU, and of the link of an exchange's ranks."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.config.lowering import H100
from ultrascale_jax.parallel.pipeline.interleave import link_speed
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import abstract_mesh

HALVES = [[*range(8)], [*range(8, 16)]]
RAILS = [[rank, rank + 8] for rank in range(8)]


@pytest.mark.parametrize(
    ("sizes", "axis", "groups", "in_a_node"),
    [
        ({"ep": 16}, "ep", HALVES, True),
        ({"ep": 16}, "ep", RAILS, False),
        ({"ep": 16, "sp": 2}, "ep", HALVES, False),
        ({"ep": 4, "sp": 4}, ("ep", "sp"), HALVES, True),
        ({"ep": 4, "sp": 4}, ("ep", "sp"), RAILS, False),
        ({"ep": 4, "sp": 2}, "ep", [[0, 2], [1, 3]], True),
    ],
)
def test_groups_within_nodes_exchange_by_nvlink(sizes, axis, groups, in_a_node):
    """Ranks of the mesh's last axes are neighbours; a node has 8."""
    speeds = []

    def exchange(x):
        return lax.all_to_all(x, axis, 0, 0, tiled=True, axis_index_groups=groups)

    def region(x):
        speeds.extend(map(link_speed, jax.make_jaxpr(exchange)(x).eqns))
        return x

    mesh, spec = abstract_mesh(MeshConfig(**{"fsdp": 1} | sizes)), P(axis)
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct((256, 2), jnp.float32, sharding=NamedSharding(mesh, spec))
        jax.eval_shape(smap(region, in_specs=spec, out_specs=spec), x)
    assert speeds == [H100.node if in_a_node else H100.network]


def test_the_speeds_are_what_programs_reach_of_an_h100():
    gpu = find_gpu("h100")
    peaks = gpu.peak_flops(), 1e9 * gpu.hbm_gbs, 1e9 * gpu.nvlink_gbs, 1e9 * gpu.network_gbs
    reached = H100.flops, H100.memory, H100.node, H100.network
    assert all(0.5 < speed / peak <= 1 for speed, peak in zip(reached, peaks, strict=True))
