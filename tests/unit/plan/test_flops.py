"""Model FLOPs against counts made by hand, parameters against the model's own, and the table of peaks."""

import dataclasses

import jax
import pytest

from ultrascale_jax.config import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Lora,
    MeshConfig,
    ModelConfig,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.plan.flops import flops_per_token, mean_keys, peak_tflops
from ultrascale_jax.plan.model_shape import ModelShape, adapter_params
from ultrascale_jax.sharding.mesh import make_mesh

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


def shape_of(**changes) -> ModelShape:
    return ModelShape.of(dataclasses.replace(MODEL, **changes))


def parameters_of_the_program(model: ModelConfig) -> int:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        made = jax.eval_shape(lambda key: Transformer(model, key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(made))


ATTENTION, DENSE, HEAD, SCORES = 2 * 5 * 8 + 2 * 5 * 4, 3 * 5 * 7, 5 * 11, 12 * 4 * 2
"""Parameters of the matrices of `MODEL`, of a layer but for the head, and the FLOPs of a token for each key it sees."""

EXPERTS = Experts(num=6, top_k=2, d_ff=9, shared=2, dense_layers=1, bias=True)
VISITED = 5 * 6 + (2 + 2) * 3 * 5 * 9
LINEAR = LinearAttention(rule="delta", key_heads=2, value_heads=4, key_dim=3, value_dim=6)
MAMBA = dataclasses.replace(LINEAR, rule="mamba2")
OF_LINEAR = 5 * (2 * 2 * 3 + 2 * 4 * 6) + 4 * 6 * 5
EVERY_SECOND = {"num_layers": 4, "full_attention_every": 2}
LATENT = LatentAttention(q_rank=6, kv_rank=3, rope_dim=2, v_dim=5)
OF_LATENT = 6 * 4 * 8 + 5 * 6 + 5 * (3 + 2) + 3 * 4 * (6 + 5) + 4 * 5 * 5
OF_LATENT_SCORES = 3 * 6 * 4 * (8 + 5) * 32  # scores of 8 dims, values of 5
WIDE = FullAttention(num_kv_heads=1, head_dim=6, values_are_keys=True)
NORMS = {"qk_norm": "head", "value_norm": True, "layer_scale": True}

COUNTED = [
    # Changes to `MODEL`, the matrices that a token meets, and the FLOPs of its attention among 64 tokens.
    ({}, 3 * (ATTENTION + DENSE) + HEAD, 3 * SCORES * 32),
    ({"tied_embeddings": True}, 3 * (ATTENTION + DENSE) + HEAD, 3 * SCORES * 32),
    ({"activation": "relu2"}, 3 * (ATTENTION + 2 * 5 * 7) + HEAD, 3 * SCORES * 32),
    (
        {"sliding_window": 16, "first_window_layer": 1},
        3 * (ATTENTION + DENSE) + HEAD,
        SCORES * (32 + 2 * (16 - 16 * 16 / 128)),
    ),
    ({"experts": EXPERTS}, 3 * ATTENTION + DENSE + 2 * VISITED + HEAD, 3 * SCORES * 32),
    (
        {"experts": EXPERTS, "mtp_layers": 2, "sliding_window": 4},
        5 * ATTENTION + DENSE + 4 * VISITED + 2 * 2 * 5 * 5 + 3 * HEAD,
        5 * SCORES * (4 - 4 * 4 / 128),
    ),
    (
        {"num_kv_heads": 4, "head_dim": 8, "latent": LATENT},
        3 * (OF_LATENT + DENSE) + HEAD,
        OF_LATENT_SCORES,
    ),
    (
        {"num_kv_heads": 4, "head_dim": 8, "latent": dataclasses.replace(LATENT, q_rank=0)},
        3 * (OF_LATENT - 5 * 6 + (5 - 6) * 4 * 8 + DENSE) + HEAD,
        OF_LATENT_SCORES,
    ),
    (
        {"linear": LINEAR, "output_gate": True} | EVERY_SECOND,
        2 * (OF_LINEAR + 5 * 2 * 4) + 2 * (ATTENTION + 5 * 8) + 4 * DENSE + HEAD,
        18 * 2 * 4 * 3 * 6 + 2 * SCORES * 32,
    ),
    (
        {"linear": MAMBA, "output_gate": True} | EVERY_SECOND,
        2 * (OF_LINEAR + 5 * 4) + 2 * (ATTENTION + 5 * 8) + 4 * DENSE + HEAD,
        12 * 2 * 4 * 3 * 6 + 2 * SCORES * 32,
    ),
    (
        {"linear": dataclasses.replace(MAMBA, norm=False, beside_attention=True)},
        3 * (OF_LINEAR + 5 * 4 + ATTENTION + DENSE) + HEAD,
        12 * 3 * 4 * 3 * 6 + 3 * SCORES * 32,
    ),
    (
        {"sliding_window": 8, "full_attention": WIDE} | EVERY_SECOND | NORMS,
        2 * ATTENTION + 2 * 5 * 6 * (2 * 4 + 1) + 4 * DENSE + HEAD,
        12 * 4 * (2 * 2 * (8 - 8 * 8 / 128) + 2 * 6 * 32),
    ),
]


@pytest.mark.parametrize(("changes", "matrices", "attention"), COUNTED)
def test_a_token_meets_the_matrices_that_are_counted_by_hand(changes, matrices, attention):
    shape = shape_of(**changes)
    assert shape.active_params == matrices
    assert flops_per_token(shape, 64) == pytest.approx(6 * matrices + attention)
    model = dataclasses.replace(MODEL, **changes)
    assert shape.num_params == parameters_of_the_program(model)


def test_frozen_matrices_have_no_gradients_and_adapters_do():
    sides = (5 + 8) + 2 * (5 + 4) + (8 + 5) + 3 * (5 + 7)
    adapters = adapter_params(MODEL, Lora(rank=2))
    assert (adapters, adapter_params(MODEL, Lora())) == (3 * 2 * sides, 0)
    saved = flops_per_token(MODEL, 64) - flops_per_token(MODEL, 64, adapters)
    assert saved == 2 * shape_of().active_params - 6 * adapters
    lora = Lora(rank=2, targets=("experts.gate_proj", "experts.down_proj"))
    model = dataclasses.replace(MODEL, experts=EXPERTS)
    assert adapter_params(model, lora, active=True) == 2 * 2 * 2 * 2 * (5 + 9)


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
    shape = ModelShape.of(model)
    assert shape.num_params == total
    assert parameters_of_the_program(model) == total
    if active is not None:
        with_lookup = shape.active_params + model.vocab_size * model.d_model
        assert with_lookup / 1e9 == pytest.approx(active, abs=0.05)


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
