"""Properties of the decoder: causality, documents, positions, generation."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.states import some_module
from ultrascale_jax.config import LinearAttention, MeshConfig, ModelConfig, Multipliers
from ultrascale_jax.models.generate import generate
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh

CFG = ModelConfig(
    vocab_size=32, d_model=16, d_ff=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
WINDOWS = dataclasses.replace(CFG, sliding_window=2)
MIXED = dataclasses.replace(WINDOWS, first_window_layer=2)
T = 12


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        yield


def make(cfg=CFG):
    """A random model on the mesh that is set, its weights large enough for logits to differ clearly."""
    return some_module(lambda: Transformer(cfg, jax.random.key(0)), std=0.16, norm=8.0)


def tokens(rows=2, length=T, seed=0):
    return np.random.default_rng(seed).integers(0, 32, (rows, length)).astype(np.int32)


def followed_by_zeros(*rows):
    """Rows of T tokens, for which there is a program: what stands after a prefix changes none of its logits."""
    return np.stack([np.pad(row, (0, T - len(row))) for row in rows])


def positions(rows=2, length=T):
    return np.tile(np.arange(length, dtype=np.int32), (rows, 1))


compute_logits = jax.jit(lambda model, *args: model.logits(*args))


def logits(model, *args):
    return np.asarray(compute_logits(model, *args))


def test_a_multiplier_is_a_factor_of_its_matrix():
    linear = LinearAttention(
        rule="mamba2", key_heads=1, value_heads=2, key_dim=4, value_dim=4, beside_attention=True
    )
    plain = dataclasses.replace(CFG, num_layers=1, linear=linear)
    names = [field.name for field in dataclasses.fields(Multipliers)]
    factors = {name: (0.25, 0.5, 2.0)[i % 3] for i, name in enumerate(names)}
    cfg = dataclasses.replace(plain, multipliers=Multipliers(**factors))
    scaled, found = make(plain), logits(make(cfg), tokens(), positions())
    [stack] = scaled.stacks
    parts = {"attn": stack.attn.attention, "linear": stack.attn.linear, "mlp": stack.mlp}
    for name, factor in factors.items():
        part, letter = name.split("_")
        weight = getattr(parts[part], f"w_{letter}")
        weight.set_value(factor * weight[...])
    np.testing.assert_array_equal(found, logits(scaled, tokens(), positions()))
    assert np.abs(found - logits(make(plain), tokens(), positions())).max() > 1e-2


def test_layers_in_the_order_of_a_pipeline_are_not_run_one_after_the_other():
    model = jax.eval_shape(lambda key: Transformer(CFG, key, ((0, 2, 1),)), jax.random.key(0))
    with pytest.raises(ValueError, match=r"gather_stages\(model\) has all"):
        jax.eval_shape(lambda m: m.logits(tokens(), positions()), model)


def test_packed_documents_equal_separate_rows():
    model, x = make(), tokens(rows=1)
    segments = np.array([[1] * 5 + [2] * 7], np.int32)
    packed_positions = np.array([[*range(5), *range(7)]], np.int32)
    packed = logits(model, x, packed_positions, segments)
    first, second = logits(model, followed_by_zeros(x[0, :5], x[0, 5:]), positions())
    np.testing.assert_allclose(packed[0], np.concatenate([first[:5], second[:7]]), atol=1e-4)


def test_only_upper_layers_use_the_window_when_told_so():
    nowhere = dataclasses.replace(WINDOWS, first_window_layer=3)
    x = tokens()
    mixed = logits(make(MIXED), x, positions())
    assert np.abs(mixed - logits(make(WINDOWS), x, positions())).max() > 1e-3
    assert np.abs(mixed - logits(make(nowhere), x, positions())).max() > 1e-3
    np.testing.assert_array_equal(
        logits(make(nowhere), x, positions()), logits(make(), x, positions())
    )


def test_greedy_generation_equals_recomputing_every_prefix():
    model = make(dataclasses.replace(MIXED, nope_every=2))
    prompt = tokens(rows=2, length=4)
    expected = followed_by_zeros(*prompt)
    for end in range(4, T):
        expected[:, end] = logits(model, expected, positions())[:, end - 1].argmax(-1)
    out = generate(model, prompt, T - 4, temperature=0, key=jax.random.key(0))
    np.testing.assert_array_equal(out, expected[:, 4:])


def test_sampling_stays_among_the_most_likely():
    model, prompt = make(), np.repeat(tokens(rows=1, length=3), 64, axis=0)
    likely = np.argsort(logits(model, followed_by_zeros(*prompt[:2]), positions())[0, 2])[-4:]
    out = generate(model, prompt, 1, temperature=2.0, top_k=4, key=jax.random.key(1))
    assert set(np.unique(out)) <= set(likely)
    assert len(np.unique(out)) > 1
