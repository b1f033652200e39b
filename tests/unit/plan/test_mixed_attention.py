"""Models with two kinds of attention: their mean layer, and linear attention beside the program that computes it."""

import dataclasses

import pytest

from ultrascale_jax.config import Config, DataConfig, LinearAttention, MeshConfig, TrainConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.parallel import gated_delta_rule
from ultrascale_jax.plan.formulas import linear_attention
from ultrascale_jax.plan.formulas.activations import layer_of, saved_bytes, working_set
from ultrascale_jax.plan.formulas.layer_time import LayerTime
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run

MODEL = dataclasses.replace(shapes.QWEN3_NEXT_80B_A3B, num_layers=4, experts=None)
GEMMA = dataclasses.replace(shapes.GEMMA4_31B, num_layers=6)


def run(mesh: str = "fsdp=1", seq_len: int = 4096, of=MODEL, **model) -> Run:
    sizes = MeshConfig.parse(mesh)
    devices = sizes.fsdp * sizes.tp * sizes.cp
    cfg = Config(
        model=dataclasses.replace(of, **model),
        mesh=sizes,
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(global_batch=sizes.batch, microbatches=1, remat="selective"),
    )
    return Run.of(cfg, devices)


def test_a_mean_layer_has_its_share_of_two_shapes_and_room_for_the_wider():
    cluster = find_cluster(None, "h100", 8)
    alike = {"full_attention": None, "full_attention_every": 0, "rope_theta_local": 0.0}
    wide = {"num_kv_heads": 4, "head_dim": 512, "values_are_keys": True, "sliding_window": None}
    mixed, local, full = (run("tp=8", of=GEMMA, **changes) for changes in ({}, alike, alike | wide))

    def numbers(one: Run) -> tuple[float, ...]:
        passes = LayerTime(one, cluster).passes
        kept = saved_bytes(one)["attention"]
        return kept, passes.products["qkv"], passes.attention, one.shape.num_params

    for mean, *parts in zip(*map(numbers, (mixed, local, full)), strict=True):
        assert mean == pytest.approx(5 / 6 * parts[0] + 1 / 6 * parts[1])
    assert working_set(mixed) == working_set(full)
    assert layer_of(full).scores > 0 == layer_of(local).scores  # cuDNN has no such heads


def test_the_formulas_have_the_blocks_of_the_program():
    assert gated_delta_rule.BLOCK == linear_attention.BLOCK


@pytest.mark.parametrize(
    ("linear", "seconds"),
    [(MODEL.linear, 13.9e-3), (shapes.GRANITE_4_H_MICRO.linear, 5.0e-3)],
    ids=["qwen3_next", "granite4_h"],
)
def test_a_layer_takes_the_time_of_its_simulated_program(linear, seconds):
    gpu, fields = find_cluster(None, "h100", 1).gpu, {"seq_len": 8192, "linear": linear}
    forward, backward = linear_attention.seconds(run(**fields), gpu)
    assert forward + backward == pytest.approx(seconds, rel=0.1)  # of the rule alone
    halves = linear_attention.seconds(run("tp=2", **fields), gpu)
    assert sum(halves) == pytest.approx((forward + backward) / 2, rel=0.01)


def test_a_mean_layer_keeps_its_share_of_both_kinds():
    def attention(**model):
        alike = run(**model)
        return saved_bytes(alike)["attention"]

    whole = attention(linear=None, full_attention_every=0)
    linear = attention(full_attention_every=0)
    assert attention() == pytest.approx(0.75 * linear + 0.25 * whole)
    beside = dataclasses.replace(MODEL.linear, beside_attention=True)
    # Both have the output; values and gates are not copied.
    once = 2 * 4096 * (MODEL.d_model + 2 * 32 * 128)
    assert attention(full_attention_every=0, linear=beside) == linear + whole - once
    wider = attention(full_attention_every=0, linear=LinearAttention(value_heads=64))
    # Values and gates, two of each, results and states are twice as many.
    assert wider - linear == 4096 * 32 * (5 * 2 * 128 + 4 * 128 * 128 / 1024)
