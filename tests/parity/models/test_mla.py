"""Latent attention without a rank of queries, on a mesh as on one device, and what it communicates.

That the numbers are those of DeepSeek-V3's own layers is shown by its checkpoint in `test_numbers.py`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tests.states import some_module
from ultrascale_jax.config import (
    ContextConfig,
    LatentAttention,
    MeshConfig,
    ModelConfig,
    RopeScaling,
)
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import map_params, scatter_sequence, zero_sizes
from ultrascale_jax.models.mla import MLA
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.primitives import gather_param, reduce_gradient
from ultrascale_jax.sharding.rules import act, specs

YARN = RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, mscale_all_dim=1.0)
LATENT = LatentAttention(q_rank=16, kv_rank=8, rope_dim=4, v_dim=6)
MODEL = ModelConfig(
    d_model=32, num_heads=4, num_kv_heads=4, head_dim=12, latent=LATENT, rope_scaling=YARN
)
DIRECT = dataclasses.replace(MODEL, latent=dataclasses.replace(LATENT, q_rank=0), sliding_window=5)


def run(sizes: MeshConfig, strategy: str = "ring"):
    """Output of one layer on this mesh, and the gradients of parameters and input for a random cotangent."""
    cfg = DIRECT
    devices = jax.devices()[: math.prod(sizes.sizes.values())]
    x, g = np.random.default_rng(0).normal(size=(2, 4, 16, 32)).astype(np.float32)
    positions = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    documents = (positions >= 9).astype(np.int32)

    def layer(mla, x_BRD, positions_BT, ids_BT):
        def gathered(value, dims, act_dims):
            return gather_param(value, dims, act_dims, jnp.float32, zero_sizes(cfg))

        out, _ = map_params(gathered, mla)(
            x_BRD,
            LayerInputs.of(
                cfg,
                positions_BT,
                ids_BT,
                window=cfg.sliding_window,
                context=ContextConfig(strategy=strategy),
            ),
        )
        return scatter_sequence(out)

    def both(mla, x_BRD, g_BRD, *batch):
        out, pull_back = jax.vjp(lambda mla, x: layer(mla, x, *batch), mla, x_BRD)
        grads, dx_BRD = pull_back(g_BRD)
        return out, map_params(reduce_gradient, grads, mla), dx_BRD

    mesh = make_mesh(sizes, devices)
    with jax.set_mesh(mesh):
        place = (act("BRD"), act("BRD"), act("BT"), act("BT"))
        arrays = (
            jax.device_put(value, NamedSharding(mesh, spec))
            for value, spec in zip((x, g, positions, documents), place, strict=True)
        )
        mla = some_module(lambda: MLA(cfg, jax.random.key(0)), std=0.06, norm=3.0)
        return jax.tree.map(np.asarray, jax.jit(both)(mla, *arrays))


def test_a_mesh_gives_what_one_device_gives():
    """Parity has latent queries, in both forms of the program."""
    found = run(MeshConfig(fsdp=1, dp=2, cp=2, tp=2), "ulysses")
    expected = run(MeshConfig(fsdp=1))
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, value), other in zip(leaves, jax.tree.leaves(found), strict=True):
        error = np.abs(other - value).max() / np.abs(value).max()
        assert error < 1e-5, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"


def gathers(jaxpr):
    """Shapes of what the all-gathers of a program return."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("all_gather"):
            yield eqn.outvars[0].aval.shape
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from gathers(inner)


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
        found = list(gathers(jax.make_jaxpr(run)(mla, x, ids).jaxpr))
    assert sorted(found) == [(2, 16, 8 + 4), (2, 16, 16)]
