"""Checkpoints through many pipelines and meshes, and a run with experts that continues from one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.checkpoints import MIXED, NINE, check_journey, on, save
from tests.runs import bits, change, in_folder, mesh_of
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.config import MeshConfig, MoEConfig, PipelineConfig
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.state import abstract_state, init_state
from ultrascale_jax.train_step.step import train_step

PIPELINES = {
    "pp2_1f1b": ({"pp": 2, "fsdp": 2, "sp": 2}, PipelineConfig()),
    "pp4_1f1b": ({"pp": 4, "fsdp": 2}, PipelineConfig()),
    # Layers as on one device; and ranks that divide no dim of any parameter.
    "pp3_1f1b": ({"pp": 3, "tp": 2}, PipelineConfig()),
    "pp3_interleaved": ({"pp": 3}, PipelineConfig(schedule="interleaved")),
    "pp4_interleaved": ({"pp": 4, "fsdp": 2}, PipelineConfig(schedule="interleaved", virtual=2)),
    "pp2_zb_v": ({"pp": 2, "dp": 2}, PipelineConfig(schedule="zb_v")),
    "ep4": ({"ep": 4}, PipelineConfig()),
    "ep2_fsdp2": ({"ep": 2, "fsdp": 2}, PipelineConfig()),
    "pp2_ep2": ({"pp": 2, "ep": 2}, PipelineConfig()),
}


@pytest.mark.parametrize(
    ("cfg", "optim", "names"),
    [
        (NINE, "adamw", ("pp2_zb_v", "pp4_interleaved", "pp2_1f1b")),
        (NINE, "muon", ("pp2_1f1b", "pp4_1f1b")),
        (NINE, "adamw", ("pp3_1f1b", "pp3_interleaved")),
        (MIXED, "adamw", ("ep4", "ep2_fsdp2", "pp2_ep2")),
        (MIXED, "muon", ("ep4", "ep2_fsdp2", "pp2_ep2")),
    ],
)
def test_a_state_returns_bit_for_bit_from_pipelines_and_experts(tmp_path, cfg, optim, names):
    places = [functools.partial(on, sizes=PIPELINES[n][0], pp=PIPELINES[n][1]) for n in names]
    check_journey(change(cfg, optim={"name": optim}), tmp_path, places)


def test_a_run_with_experts_continues_as_if_it_had_not_stopped(tmp_path):
    moe = MoEConfig(capacity_factor=1.0, aux_weight=0.01, bias_rate=0.01)
    cfg = in_folder(dataclasses.replace(MIXED, mesh=MeshConfig(fsdp=1, ep=4), moe=moe), tmp_path)
    mesh, loader = mesh_of(cfg), Loader(cfg.data, vocab_size=64, global_batch=8, seed=0)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(train_step, cfg))
        sharding = NamedSharding(mesh, act("BT"))
        batches = [jax.device_put(loader.batch(i), sharding) for i in range(4)]
        state = init_state(cfg, mesh)
        for batch in batches[:2]:
            state, _ = step(state, batch)
        save(cfg, state, 2)
        with Checkpoints(cfg) as checkpoints:
            resumed = checkpoints.restore(2, abstract_state(cfg, mesh))
        for batch in batches[2:]:
            (state, metrics), (resumed, again) = step(state, batch), step(resumed, batch)
            assert bits(metrics) == bits(again)
    assert bits(state) == bits(resumed)
    assert np.any(state.params.stacks[-1].moe.bias[...])


def test_params_of_a_pipeline_load_on_another_with_consecutive_layers(tmp_path):
    cfg = in_folder(on(NINE, *PIPELINES["pp4_interleaved"]), tmp_path)
    save(cfg, init_state(cfg, mesh_of(cfg)), 1)
    params = init_state(NINE, mesh_of(NINE)).params
    _, alone = load_params(tmp_path, mesh_of(NINE))
    assert bits(alone) == bits(params)
    on_two, halves = load_params(tmp_path, make_mesh(MeshConfig(pp=2, fsdp=1), jax.devices()[:2]))
    assert on_two.pp == PipelineConfig() and on_two.mesh.pp == 2
    assert halves.orders == ((*range(9), None),)
    for leaf, expected in zip(
        jax.tree.leaves(halves.stacks), jax.tree.leaves(params.stacks), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(leaf)[:9], expected)
