"""Model FLOPs against counts made by hand, and the table of peaks."""

import dataclasses

import pytest

from ultrascale_jax.config import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Lora,
    ModelConfig,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.plan.flops import (
    flops_per_token,
    mean_keys,
    peak_tflops,
)
from ultrascale_jax.plan.model_shape import ModelShape, adapter_params

MODEL = ModelConfig(
    vocab_size=11,
    d_model=5,
    d_ff=7,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    tied_embeddings=False,
)


def active_params(model: ModelConfig) -> int:
    return ModelShape.of(model).active_params


def test_matrix_parameters_are_counted_by_hand():
    q, k, v, o = 5 * 8, 5 * 4, 5 * 4, 8 * 5
    for tied in (False, True):  # a tied head still multiplies
        model = dataclasses.replace(MODEL, tied_embeddings=tied)
        assert active_params(model) == 3 * (q + k + v + o + 3 * 5 * 7) + 5 * 11


def test_frozen_matrices_have_no_gradients_and_adapters_do():
    sides = (5 + 8) + 2 * (5 + 4) + (8 + 5) + 3 * (5 + 7)
    adapters = adapter_params(MODEL, Lora(rank=2))
    assert (adapters, adapter_params(MODEL, Lora())) == (3 * 2 * sides, 0)
    saved = flops_per_token(MODEL, 64) - flops_per_token(MODEL, 64, adapters)
    assert saved == 2 * active_params(MODEL) - 6 * adapters


def test_a_token_meets_the_adapters_of_the_experts_that_it_visits():
    experts = Experts(num=6, top_k=2, d_ff=9)
    model = dataclasses.replace(MODEL, experts=experts)
    lora = Lora(rank=2, targets=("experts.gate_proj", "experts.down_proj"))
    assert adapter_params(model, lora) == 3 * 2 * 6 * 2 * (5 + 9)
    assert adapter_params(model, lora, active=True) == 3 * 2 * 2 * 2 * (5 + 9)


def test_of_the_experts_those_count_that_a_token_visits():
    experts = Experts(num=6, top_k=2, d_ff=9, shared=2, dense_layers=1, bias=True)
    model = dataclasses.replace(MODEL, experts=experts)
    attention, dense, router, expert = 5 * 8 * 2 + 5 * 4 * 2, 3 * 5 * 7, 5 * 6, 3 * 5 * 9
    counted = 3 * attention + dense + 5 * 11 + 2 * router
    assert active_params(model) == counted + 2 * (2 + 2) * expert
    vectors = 3 * 2 * 5 + 2 * 6 + 5
    assert ModelShape.of(model).num_params == counted + 2 * (6 + 2) * expert + 5 * 11 + vectors


def test_a_layer_without_a_gate_has_two_matrices():
    experts = Experts(num=4, top_k=2, d_ff=8, shared=1)
    sizes = {"d_ff": 8, "experts": experts, "num_layers": 1}
    gated, plain = (
        ModelShape.of(dataclasses.replace(MODEL, activation=name, **sizes))
        for name in ("silu", "relu2")
    )
    assert gated.num_params - plain.num_params == (4 + 1) * MODEL.d_model * 8
    assert gated.active_params - plain.active_params == (2 + 1) * MODEL.d_model * 8


def test_a_module_of_multi_token_prediction_is_a_layer_a_projection_and_a_head():
    experts = Experts(num=6, top_k=2, d_ff=9, shared=2, dense_layers=1, bias=True)
    for model in (MODEL, dataclasses.replace(MODEL, experts=experts, sliding_window=4)):
        more = dataclasses.replace(model, mtp_layers=2)
        longer = dataclasses.replace(model, num_layers=model.num_layers + 2)
        own = 2 * 2 * 5 * 5
        assert active_params(more) == active_params(longer) + own + 2 * 5 * 11
        total = ModelShape.of(longer).num_params + own + 2 * 3 * 5
        assert ModelShape.of(more).num_params == total
        flops = flops_per_token(longer, 64) + 6 * (own + 2 * 5 * 11)
        assert flops_per_token(more, 64) == flops


@pytest.mark.parametrize("q_rank", [6, 0])
def test_latent_attention_is_counted_by_hand(q_rank):
    latent = LatentAttention(q_rank=q_rank, kv_rank=3, rope_dim=2, v_dim=5)
    model = dataclasses.replace(MODEL, num_kv_heads=4, head_dim=8, latent=latent)
    q = 5 * 6 + 6 * 4 * 8 if q_rank else 5 * 4 * 8
    kv_a, kv_b, o = 5 * (3 + 2), 3 * 4 * (6 + 5), 4 * 5 * 5
    matrices = 3 * (q + kv_a + kv_b + o + 3 * 5 * 7) + 5 * 11
    assert active_params(model) == matrices
    assert ModelShape.of(model).num_params == matrices + 5 * 11 + 3 * (2 * 5 + q_rank + 3) + 5
    attention = 3 * 6 * 4 * (8 + 5) * 64 / 2  # scores of 8 dims, values of 5
    assert flops_per_token(model, 64) == 6 * matrices + attention


@pytest.mark.parametrize(
    ("rule", "gates", "vectors", "state"),
    [
        ("delta", 2, (2 * 2 * 3 + 4 * 6) * 4 + 2 * 4 + 6, 18),
        ("mamba2", 1, (2 * 2 * 3 + 4 * 6) * (4 + 1) + 3 * 4 + 4 * 6, 12),
    ],
)
def test_linear_attention_is_counted_by_hand(rule, gates, vectors, state):
    linear = LinearAttention(rule=rule, key_heads=2, value_heads=4, key_dim=3, value_dim=6)
    model = dataclasses.replace(
        MODEL, num_layers=4, linear=linear, full_attention_every=2, output_gate=True
    )
    of_linear = 5 * (2 * 2 * 3 + 2 * 4 * 6 + gates * 4) + 4 * 6 * 5
    matrices = 2 * of_linear + 2 * (5 * 8 * 3 + 5 * 4 * 2) + 4 * 3 * 5 * 7 + 5 * 11
    assert active_params(model) == matrices
    vectors = 2 * vectors + 4 * 2 * 5 + 5
    assert ModelShape.of(model).num_params == matrices + vectors + 5 * 11
    states, scores = state * 2 * 4 * 3 * 6, 12 * 2 * 4 * 2 * 64 / 2
    assert flops_per_token(model, 64) == 6 * matrices + states + scores


def test_attention_beside_mamba_is_counted_by_hand():
    linear = LinearAttention(
        rule="mamba2", key_heads=2, value_heads=4, key_dim=3, value_dim=6, norm=False,
        beside_attention=True,
    )  # fmt: skip
    model = dataclasses.replace(MODEL, num_layers=3, linear=linear)
    of_linear = 5 * (2 * 2 * 3 + 2 * 4 * 6 + 4) + 4 * 6 * 5
    matrices = 3 * (of_linear + 5 * 8 * 2 + 5 * 4 * 2 + 3 * 5 * 7) + 5 * 11
    assert active_params(model) == matrices
    vectors = 3 * ((2 * 2 * 3 + 4 * 6) * (4 + 1) + 3 * 4 + 2 * 5) + 5
    assert ModelShape.of(model).num_params == matrices + vectors + 5 * 11
    states, scores = 12 * 3 * 4 * 3 * 6, 12 * 3 * 4 * 2 * 64 / 2
    assert flops_per_token(model, 64) == 6 * matrices + states + scores


def test_full_attention_of_another_shape_is_counted_by_hand():
    full = FullAttention(num_kv_heads=1, head_dim=6, values_are_keys=True)
    model = dataclasses.replace(
        MODEL, num_layers=4, sliding_window=8, full_attention_every=2, full_attention=full,
        qk_norm="head", value_norm=True, layer_scale=True,
    )  # fmt: skip
    attention = 2 * 5 * 2 * (2 * 4 + 2 * 2) + 2 * 5 * 6 * (2 * 4 + 1)
    matrices = attention + 4 * 3 * 5 * 7 + 5 * 11
    assert active_params(model) == matrices
    vectors = 2 * 2 * 2 + 2 * 2 * 6 + 4 * (2 * 5 + 1) + 5
    assert ModelShape.of(model).num_params == matrices + vectors + 5 * 11
    scores = 12 * 4 * (2 * 2 * mean_keys(64, 8) + 2 * 6 * 64 / 2)
    assert flops_per_token(model, 64) == pytest.approx(6 * matrices + scores)
    sides = 2 * (5 + 8 + 2 * (5 + 4) + 8 + 5) + 2 * (5 + 24 + 5 + 6 + 24 + 5)
    adapters = adapter_params(model, Lora(rank=2))
    assert adapters == 2 * (sides + 4 * 3 * (5 + 7))


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        (shapes.SMOLLM2_135M, 134_515_008, None),
        (shapes.LLAMA32_1B, 1_235_814_400, None),
        (shapes.LLAMA3_8B, 8_030_261_248, None),
        (shapes.LLAMA31_8B, 8_030_261_248, None),
        (shapes.LLAMA3_70B, 70_553_706_496, None),
        (shapes.LLAMA3_405B, 405_853_388_800, None),
        (shapes.GRANITE_4_H_MICRO, 3_191_396_096, None),
        (shapes.FALCON_H1_500M, 521_411_104, None),
        (shapes.QWEN3_8B, 8_190_735_360, None),
        (shapes.QWEN3_32B, 32_762_123_264, None),
        (shapes.MIXTRAL_8X7B, 46_702_792_704, 12.9),  # with the embedding
        (shapes.QWEN3_30B_A3B, 30_532_122_624, 3.35),
        (shapes.QWEN3_NEXT_80B_A3B, 79_674_391_296, 3.87),
        (shapes.DEEPSEEK_V3, 671_026_419_200, 37.55),
        (shapes.GPT_OSS_20B, 20_914_757_184, None),
        (shapes.GEMMA3_12B, 11_766_034_176, None),
        (shapes.GEMMA4_31B, 30_697_345_340, None),
    ],
)
def test_shapes_have_the_published_number_of_parameters(model, total, active):
    assert ModelShape.of(model).num_params == total
    if active is not None:
        with_lookup = active_params(model) + model.vocab_size * model.d_model
        assert with_lookup / 1e9 == pytest.approx(active, abs=0.05)


def test_a_window_limits_attention_in_the_layers_that_use_it():
    windowed = dataclasses.replace(MODEL, sliding_window=16, first_window_layer=1)
    by_hand = 12 * 4 * 2 * (1 * 32 + 2 * (16 - 16 * 16 / 128))
    assert flops_per_token(windowed, 64) == 6 * active_params(MODEL) + by_hand


def test_the_mean_number_of_keys_is_the_mean_of_the_mask():
    rows = [min(t, 100) for t in range(1, 1001)]
    assert mean_keys(1000, 100) == pytest.approx(sum(rows) / 1000, rel=0.01)
    assert mean_keys(64, 64) == mean_keys(64, None) == mean_keys(64, 100)


@pytest.mark.parametrize(
    ("kind", "bf16", "fp32"),  # the cards' own peaks are in test_hardware.py
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GB300", 2500.0, 1250.0),
        ("NVIDIA L40", None, None),
        ("cpu", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
    ],
)
def test_each_device_has_its_dense_peak_or_none(kind, bf16, fp32):
    assert (peak_tflops(kind, "bf16"), peak_tflops(kind, "fp32")) == (bf16, fp32)
