"""A model whose full layers have attention of another shape costs the mean of two models, each with one shape."""

import dataclasses

import pytest

from ultrascale_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.plan.formulas.activations import layer_of, saved_bytes, working_set
from ultrascale_jax.plan.formulas.layer_time import LayerTime
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run

MODEL = dataclasses.replace(shapes.GEMMA4_31B, num_layers=6)
ALIKE = {"full_attention": None, "full_attention_every": 0, "rope_theta_local": 0.0}


def run(**model) -> Run:
    cfg = Config(
        model=dataclasses.replace(MODEL, **model),
        mesh=MeshConfig.of(fsdp=1, tp=8),
        data=DataConfig(seq_len=4096),
        train=TrainConfig(global_batch=1, microbatches=1, remat="selective"),
    )
    return Run.of(cfg, 8)


def test_a_mean_layer_has_its_share_of_both_shapes_and_room_for_the_wider():
    cluster = find_cluster(None, "h100", 8)
    whole = {"num_kv_heads": 4, "head_dim": 512, "values_are_keys": True, "sliding_window": None}
    mixed, local, full = run(), run(**ALIKE), run(**ALIKE, **whole)

    def numbers(one: Run) -> tuple[float, ...]:
        passes = LayerTime(one, cluster).passes
        kept = saved_bytes(one)["attention"]
        return kept, passes.products["qkv"], passes.attention, one.shape.num_params

    for mean, *parts in zip(*map(numbers, (mixed, local, full)), strict=True):
        assert mean == pytest.approx(5 / 6 * parts[0] + 1 / 6 * parts[1])
    assert working_set(mixed) == working_set(full)
    assert layer_of(full).scores > 0 == layer_of(local).scores  # cuDNN has no such heads
