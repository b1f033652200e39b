"""In a region that is manual over all axes a layer communicates and keeps what it does in the Explicit program.

Pipelines run this form, and rows of parity compare them with one device.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jaxprs import equations
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Keep,
    LatentAttention,
    MeshConfig,
    ModelConfig,
    RopeScaling,
    TrainConfig,
)
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import scatter_sequence
from ultrascale_jax.models.mla import MLA
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import abstract_mesh, make_mesh
from ultrascale_jax.sharding.rules import act, manual, specs
from ultrascale_jax.train_step.precision import layer_inputs
from ultrascale_jax.train_step.remat import of_last_layer
from ultrascale_jax.train_step.state import initial_state
from ultrascale_jax.train_step.zero import prepare_params

BASE = Config(
    model=ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(global_batch=8, precision="fp32"),
)
FSDP_SP_TP, SP_TP = {"fsdp": 2, "sp": 2, "tp": 2}, {"sp": 4, "tp": 2}
FEW_KV_HEADS = {"num_kv_heads": 2, "qk_norm": "full", "qkv_bias": True, "sliding_window": 7}


def configure(mesh, train, model) -> Config:
    cfg = dataclasses.replace(
        BASE,
        mesh=MeshConfig.of(**mesh),
        model=dataclasses.replace(BASE.model, **model),
        train=dataclasses.replace(BASE.train, **train),
    )
    return cfg.check(8)


def trace_layer(cfg, in_region):
    """Of one layer's forward and backward pass: the equations, and what is kept between the two."""
    found = {}

    def fn(params, x_BRD, ids_BT):
        block = jax.tree.map(lambda p: p[0], prepare_params(cfg, params).stacks[0])
        recomputation = of_last_layer(cfg)
        ids = {"positions": ids_BT, "segment_ids": ids_BT}
        inputs = recomputation.adapt(layer_inputs(cfg, ids, None))

        def layer(block, x_BRD):
            return block.gather_params(inputs)(x_BRD, inputs)[0]

        def both(block, x_BRD, g_BRD):
            return jax.vjp(recomputation.wrap(layer), block, x_BRD)[1](g_BRD)

        _, pull_back = jax.vjp(recomputation.wrap(layer), block, x_BRD)
        kept = [jax.typeof(r) for r in jax.tree.leaves(pull_back)]
        shapes = [k.shape if manual() else k.sharding.shard_shape(k.shape) for k in kept]
        found["kept"] = collections.Counter(shape for shape in shapes if shape not in ((), (1,)))
        found["eqns"] = list(equations(jax.make_jaxpr(both)(block, x_BRD, x_BRD).jaxpr))
        return x_BRD

    mesh = abstract_mesh(cfg.mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        params = jax.eval_shape(lambda: initial_state(cfg)).params
        x = jax.ShapeDtypeStruct((8, 32, 32), jnp.float32, sharding=NamedSharding(mesh, act("BRD")))
        ids = jax.ShapeDtypeStruct((8, 32), jnp.int32, sharding=NamedSharding(mesh, act("BT")))
        if in_region:
            rests = jax.tree.map(lambda p: P() if p.sharding is None else p.sharding.spec, params)
            fn = smap(fn, in_specs=(rests, act("BRD"), act("BT")), out_specs=act("BRD"))
        jax.eval_shape(fn, params, x, ids)
    return found


SP, TP, CP = ("sp",), ("tp",), ("cp",)
LAYER = {  # a half-block gathers its input and scatters its output, and backward the other way round
    ("all_gather", SP): 4,
    ("reduce_scatter", SP): 4,
}


@pytest.mark.parametrize(
    ("mesh", "train", "model", "more"),
    [
        ({"fsdp": 2, "sp": 2, "tp": 2}, {"zero": 1}, {"qk_norm": "head"}, {("psum", TP): 4}),
        (
            {"fsdp": 2, "sp": 2, "tp": 2},
            {"zero": 3},  # seven matrices, gathered again for the backward pass
            {"qkv_bias": True},
            {("psum", TP): 4, ("all_gather", ("fsdp",)): 14, ("reduce_scatter", ("fsdp",)): 7},
        ),
        (
            {"cp": 2, "sp": 4},  # keys with values go on twice, gradients once
            {"zero": 1},
            {"num_kv_heads": 2},
            {("ppermute", CP): 3, ("all_gather", CP): 2},  # the ends of the documents
        ),
        (
            {"sp": 4, "tp": 2},  # the mean squares of queries and keys
            {"zero": 3},
            {"num_kv_heads": 2, "qk_norm": "full"},
            {("psum", TP): 4, ("psum", ("sp", "tp")): 4},
        ),
    ],
    ids=["zero1", "zero3", "cp", "qk_norm"],
)
def test_a_layer_communicates_as_the_explicit_one_does(mesh, train, model, more):
    cfg = configure(mesh, train, model)
    found = collections.Counter()
    for eqn in trace_layer(cfg, in_region=True)["eqns"]:
        axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        if eqn.primitive.name.startswith(("psum", "all_", "reduce_scatter", "ppermute")):
            axes = (axes,) if isinstance(axes, str) else axes
            axes = tuple(axis for axis in axes if cfg.mesh.sizes[axis] > 1)
            found[eqn.primitive.name.removesuffix("_invariant"), axes] += len(axes) > 0
    assert +found == LAYER | more


@pytest.mark.parametrize(
    "policy", ["none", "dots", "selective", "full", Keep(saved=("q", "attn_core"))]
)
@pytest.mark.parametrize(
    ("mesh", "model"), [(FSDP_SP_TP, {"qk_norm": "head"}), (SP_TP, FEW_KV_HEADS)], ids=str
)
def test_a_layer_keeps_what_the_explicit_one_keeps(mesh, model, policy):
    cfg = configure(mesh, {"remat": policy}, model)
    explicit, found = (trace_layer(cfg, in_region)["kept"] for in_region in (False, True))
    if policy == "none":  # but for the rotary angles: not once for queries and once for keys
        cos = (cfg.train.global_batch // cfg.mesh.batch, 32, 1, 1, cfg.model.head_dim // 2)
        assert explicit.pop(cos) == 4
        assert found.pop((*cos[:2], cos[4])) == 2
    assert found == explicit


YARN = RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, mscale_all_dim=1.0)
LATENT = LatentAttention(q_rank=16, kv_rank=8, rope_dim=4, v_dim=6)
LATENT_MODEL = ModelConfig(
    d_model=32, num_heads=4, num_kv_heads=4, head_dim=12, latent=LATENT, rope_scaling=YARN
)


def test_latents_travel_over_sp_and_not_the_residual_stream():
    mesh = make_mesh(MeshConfig(fsdp=1, sp=4), jax.devices()[:4])

    def forward(mla, x_BRD, positions_BT):
        partial_BTD, _ = mla(x_BRD, LayerInputs.of(LATENT_MODEL, positions_BT))
        return scatter_sequence(partial_BTD)

    with jax.set_mesh(mesh):
        mla = jax.eval_shape(lambda: MLA(LATENT_MODEL, jax.random.key(0)))
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
