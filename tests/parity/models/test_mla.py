"""What latent attention communicates.

Rows of `tests/parity/rows.py` have its numbers on meshes; that they are those of DeepSeek-V3's own layers is shown by
its checkpoint in `test_numbers.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from tests.jaxprs import equations
from ultrascale_jax.config import (
    LatentAttention,
    MeshConfig,
    ModelConfig,
    RopeScaling,
)
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import scatter_sequence
from ultrascale_jax.models.mla import MLA
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act, specs

YARN = RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, mscale_all_dim=1.0)
LATENT = LatentAttention(q_rank=16, kv_rank=8, rope_dim=4, v_dim=6)
MODEL = ModelConfig(
    d_model=32, num_heads=4, num_kv_heads=4, head_dim=12, latent=LATENT, rope_scaling=YARN
)


def test_latents_travel_over_sp_and_not_the_residual_stream():
    mesh = make_mesh(MeshConfig(fsdp=1, sp=4), jax.devices()[:4])

    def forward(mla, x_BRD, positions_BT):
        partial_BTD, _ = mla(x_BRD, LayerInputs.of(MODEL, positions_BT))
        return scatter_sequence(partial_BTD)

    with jax.set_mesh(mesh):
        mla = jax.eval_shape(lambda: MLA(MODEL, jax.random.key(0)))
        x = jax.ShapeDtypeStruct((2, 16, 32), jnp.float32, sharding=NamedSharding(mesh, act("BRD")))
        ids = jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=NamedSharding(mesh, act("BT")))
        rests = specs((mla, x, ids))
        run = smap(forward, in_specs=rests, out_specs=act("BRD"))
        gathered = [
            eqn.outvars[0].aval.shape
            for eqn in equations(jax.make_jaxpr(run)(mla, x, ids).jaxpr)
            if eqn.primitive.name.startswith("all_gather")
        ]
    assert sorted(gathered) == [(2, 16, 8 + 4), (2, 16, 16)]
