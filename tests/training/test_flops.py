"""Model FLOPs against counts made by hand, and the table of peaks."""

import dataclasses

import pytest

from ultrascale_jax.config import ModelConfig
from ultrascale_jax.training.flops import flops_per_token, matmul_params, mean_keys, peak_tflops

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


def test_matrix_parameters_are_counted_by_hand():
    q, k, v, o = 5 * 8, 5 * 4, 5 * 4, 8 * 5
    assert matmul_params(MODEL) == 3 * (q + k + v + o + 3 * 5 * 7) + 5 * 11


def test_a_tied_head_still_multiplies():
    assert matmul_params(dataclasses.replace(MODEL, tied_embeddings=True)) == matmul_params(MODEL)


def test_causal_attention_counts_as_half_of_the_full_matrix():
    full = 12 * 3 * 4 * 2 * 64  # 12 L N H T
    assert flops_per_token(MODEL, 64) == 6 * matmul_params(MODEL) + full / 2


def test_a_window_limits_attention_in_the_layers_that_use_it():
    windowed = dataclasses.replace(MODEL, sliding_window=16, first_window_layer=1)
    by_hand = 12 * 4 * 2 * (1 * 32 + 2 * (16 - 16 * 16 / 128))
    assert flops_per_token(windowed, 64) == 6 * matmul_params(MODEL) + by_hand


def test_a_window_as_long_as_the_sequence_changes_nothing():
    assert mean_keys(64, 64) == mean_keys(64, None) == mean_keys(64, 100)


def test_the_mean_number_of_keys_is_the_mean_of_the_mask():
    rows = [min(t, 100) for t in range(1, 1001)]
    assert mean_keys(1000, 100) == pytest.approx(sum(rows) / 1000, rel=0.01)


def test_llama3_8b_at_8192_tokens_needs_its_published_count():
    llama = ModelConfig(
        vocab_size=128256,
        d_model=4096,
        d_ff=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    assert (
        matmul_params(llama) == 7_504_658_432
    )  # 8.03e9 parameters less the embedding table and the norms
    assert flops_per_token(llama, 8192) == 6 * 7_504_658_432 + 6 * 32 * 32 * 128 * 8192


@pytest.mark.parametrize(
    ("kind", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0, 156.0),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756.5, 378.0),
        ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA B200", 2250.0, 1125.0),
        ("NVIDIA L40S", 362.05, 183.0),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("cpu", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
    ],
)
def test_each_device_has_its_dense_peak_or_none(kind, bf16, fp32):
    assert (peak_tflops(kind, "bf16"), peak_tflops(kind, "fp32")) == (bf16, fp32)
