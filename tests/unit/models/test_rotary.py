"""Rotary frequencies equal those of `transformers` for every stretch, and the angles hold at a million tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultrascale_jax.config import ModelConfig, RopeScaling
from ultrascale_jax.models.rotary import frequencies, rotary, rotate

MODEL = ModelConfig(d_model=32, num_heads=2, num_kv_heads=2, head_dim=16)
LLAMA = dataclasses.replace(MODEL, rope_theta=500_000.0)
YARN_64 = RopeScaling(kind="yarn", factor=4.0, original_seq_len=64, attention_factor=1.5)
YARN_1M = RopeScaling(kind="yarn", factor=128.0, high_freq_factor=4.0)
STRETCHED = dataclasses.replace(LLAMA, head_dim=128, rope_scaling=YARN_1M)

# `inv_freq` and `attention_scaling` of transformers 5.23's LlamaRotaryEmbedding(LlamaConfig(hidden_size=32,
# num_attention_heads=2, head_dim=16, rope_parameters=...)) with torch 2.13, to eight digits.
EXPECTED = {
    "none": (
        MODEL, None, 1.0,
        [1.0, 0.31622776, 0.1, 0.031622779, 0.0099999998, 0.0031622779, 0.001, 0.00031622779],
    ),
    "linear": (
        MODEL, RopeScaling(kind="linear", factor=4.0), 1.0,
        [0.25, 0.079056941, 0.025, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
    ),
    "yarn": (
        MODEL, RopeScaling(kind="yarn", factor=8.0, original_seq_len=4096), 1.2079441541679836,
        [1.0, 0.31622776, 0.1, 0.024705295, 0.0056249998, 0.001087033, 0.00012500001, 3.9528473e-05],
    ),
    "yarn with a ramp from the first dim and its own magnitude": (
        MODEL, YARN_64, 1.5,
        [1.0, 0.23717082, 0.049999997, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
    ),
    "yarn to 1M": (
        LLAMA, YARN_1M, 1.4852030263919618,
        [1.0, 0.19392276, 0.037606031, 0.0072926651, 0.00071263098, 2.142564e-06, 4.1549185e-07, 8.0573322e-08],
    ),
    "llama3": (
        LLAMA, RopeScaling(), 1.0,
        [1.0, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06, 1.2891732e-06],
    ),
}  # fmt: skip


@functools.cache
def of_64_positions() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Cosine and sine of each row of `EXPECTED`."""
    cfgs = {
        name: dataclasses.replace(model, rope_scaling=scaling)
        for name, (model, scaling, *_) in EXPECTED.items()
    }
    run = jax.jit(lambda positions: {name: rotary(positions, cfg) for name, cfg in cfgs.items()})
    return jax.tree.map(np.asarray, run(np.arange(64, dtype=np.int32)[None]))


@pytest.mark.parametrize("name", EXPECTED)
def test_frequencies_and_magnitude_are_those_of_transformers(name):
    model, scaling, magnitude, inv_freq = EXPECTED[name]
    cfg = dataclasses.replace(model, rope_scaling=scaling)
    np.testing.assert_allclose(frequencies(cfg), inv_freq, rtol=1e-6)
    cos, sin = of_64_positions()[name]
    np.testing.assert_allclose(np.hypot(cos, sin), magnitude, rtol=1e-6)
    angle = np.arange(64)[None, :, None] * np.array(inv_freq)[None, None, :]
    np.testing.assert_allclose(cos, magnitude * np.cos(angle), rtol=0, atol=1e-5)
    np.testing.assert_allclose(sin, magnitude * np.sin(angle), rtol=0, atol=1e-5)


rotary_of_stretched = jax.jit(lambda positions: rotary(positions, STRETCHED))


@pytest.mark.parametrize("start", [0, 8192, 2**17, 2**20, 2**24, 2**30])
def test_angles_are_right_to_1e_6_at_any_position(start):
    positions = np.arange(start - 500, start + 500, dtype=np.int32).clip(0)
    rope = rotary_of_stretched(positions[None])
    angle = positions[None, :, None].astype(np.float64) * frequencies(STRETCHED)[None, None, :]
    for got, function in zip(rope, (np.cos, np.sin), strict=True):
        expected = YARN_1M.magnitude * function(angle)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1e-6)


def test_scores_depend_on_the_distance_alone_a_million_tokens_in():
    q_BTNH, k_BTNH = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 128)).astype(np.float32)

    @jax.jit
    def score(q_at_BT, k_at_BT):
        pairs = (q_BTNH, q_at_BT), (k_BTNH, k_at_BT)
        q, k = (rotate(x, rotary(at_BT, STRETCHED)) for x, at_BT in pairs)
        return jnp.sum(q * k)

    scores = []
    for start in (0, 2**20 - 64):
        at = (np.full((1, 1), start + offset, np.int32) for offset in (50, 3))
        scores.append(float(score(*at)))
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=1e-4)
