"""Head and loss in one against float64: reference, kernels in the GPU interpreter; and what H100s run."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.gpu_kernels import relative
from ultrascale_jax.kernels import linear_cross_entropy_mosaic as mosaic
from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy

module = importlib.import_module("ultrascale_jax.kernels.linear_cross_entropy")
Z_LOSS, WEIGHT = 0.1, 0.02


def inputs(M, D, V, dtype=np.float32):
    rng = np.random.default_rng(0)
    x, head = (rng.normal(size=shape) for shape in ((M, D), (D, V)))
    targets = rng.integers(0, V, M)
    targets[::5] = -1
    return x.astype(dtype), (head / 4).astype(dtype), targets.astype(np.int32)


def exact(x, head, targets, cotangents=(1.0, 0.0)):
    """Objective, bare loss, and the gradients of x and head, in float64 with all logits."""
    x, head = (np.asarray(a, np.float64) for a in (x, head))
    logits, targets = x @ head, np.asarray(targets)
    lse = np.log(np.sum(np.exp(logits), axis=1))
    token, word = np.nonzero(targets >= 0)[0], targets[targets >= 0]
    loss = WEIGHT * np.sum(lse[token] - logits[token, word])
    objective = loss + WEIGHT * Z_LOSS * np.sum(lse[token] ** 2)
    one, both = cotangents[0], sum(cotangents)
    scale = np.where(targets >= 0, WEIGHT, 0.0) * (both + one * 2 * Z_LOSS * lse)
    d = np.exp(logits - lse[:, None]) * scale[:, None]
    d[token, word] -= WEIGHT * both
    return (objective, loss), (d @ head.T, x.T @ d)


def loss(x, head, targets, implementation="xla", **options):
    return linear_cross_entropy(
        x, head, targets, weight=np.float32(WEIGHT), z_loss=Z_LOSS,
        implementation=implementation, **options,
    )  # fmt: skip


def with_gradients(loss):
    def run(x, head, targets, cotangents=(1.0, 0.0)):
        values, pull_back = jax.vjp(lambda x, head: loss(x, head, targets), x, head)
        return values, pull_back(tuple(map(jnp.float32, cotangents)))

    return run


reference = jax.jit(with_gradients(loss))


@pytest.mark.parametrize("cotangents", [(1.0, 0.0), (3.0, 0.5)], ids=str)
def test_the_reference_equals_float64(cotangents):
    given = inputs(20, 12, 600)
    values, gradients = reference(*given, cotangents)
    expected, expected_gradients = exact(*given, cotangents)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert relative(got, want) < 1e-6


@pytest.mark.parametrize("chunk_bytes", [4 * 600 * 7, 1], ids=["a few", "one"])
def test_chunks_of_tokens_and_words_change_nothing(chunk_bytes, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    x, head, targets = inputs(20, 12, 600)
    given = x.reshape(4, 5, 12), head, targets.reshape(4, 5)
    values, (dx, dhead) = with_gradients(loss)(*given)
    expected, expected_gradients = exact(x, head, targets)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert relative(dx.reshape(20, 12), expected_gradients[0]) < 1e-6
    assert relative(dhead, expected_gradients[1]) < 1e-6


@pytest.mark.parametrize("target", [600, 10**6, -2])
def test_a_target_that_is_no_word_makes_the_loss_nan(target):
    x, head, targets = inputs(20, 12, 600)
    targets[3] = target
    values, gradients = reference(x, head, targets)
    assert all(np.isnan(value).any() for value in (*values, *gradients))


@pytest.mark.parametrize(
    ("shape", "start", "width", "words"),
    [
        pytest.param((128, 256, 384), 0, 256, 384, id="chain"),
        # The last tile is not full, and one warpgroup has nothing of it; the last columns are padding.
        pytest.param((256, 64, 544), 256, 288, 501, id="ragged"),
    ],
)
def test_the_kernels_in_the_interpreter_equal_float64_and_have_no_races(
    interpreted, shape, start, width, words
):
    x, head, targets = inputs(*shape, jnp.bfloat16)
    M, _, V = shape
    targets = np.where(targets < words, targets, -1)
    # Words of the next piece of a vocabulary.
    targets[1::5] += V
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64)
    logits[:, words:] = -1e30
    lse = np.log(np.sum(np.exp(logits), axis=1))
    hit = np.arange(V) == targets[:, None]
    d_lse, d_target = np.random.default_rng(1).uniform(size=(2, M)).astype(np.float32)

    def run(x, head, targets, start, *rows):
        given = x, head, targets, jnp.int32(words)
        return *mosaic.statistics(*given), mosaic.gradient(*given, *rows, start, width)

    rows = lse.astype(np.float32), d_lse, d_target
    got_lse, got_gold, got = interpreted(run, x, head, targets, np.int32(start), *rows)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5)
    np.testing.assert_allclose(got_gold, np.sum(logits * hit, axis=1), atol=1e-5)
    gradient = d_lse[:, None] * np.exp(logits - lse[:, None]) + d_target[:, None] * hit
    assert got.dtype == jnp.bfloat16
    assert relative(got, gradient[:, start : start + width]) < 4e-3


def test_the_backward_pass_in_the_interpreter_visits_every_chunk_of_the_vocabulary(
    interpreted, monkeypatch
):
    M, D, V = 128, 64, 544
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * M * 256)  # two whole chunks, and a part
    x, head, targets = inputs(M, D, V, jnp.bfloat16)
    d_lse, d_target = np.random.default_rng(1).uniform(size=(2, M)).astype(np.float32)

    def run(x, head, *cotangents):
        fused = functools.partial(module.statistics, True)
        return jax.vjp(lambda x, head: fused(x, head, targets, jnp.int32(V)), x, head)[1](
            cotangents
        )

    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    hit = np.arange(V) == targets[:, None]
    dlogits = d_lse[:, None] * softmax + d_target[:, None] * hit
    expected = dlogits @ np.asarray(head, np.float64).T, np.asarray(x, np.float64).T @ dlogits
    for got, want in zip(interpreted(run, x, head, d_lse, d_target), expected, strict=True):
        assert got.dtype == jnp.bfloat16
        assert relative(got, want) < 1e-2


def split_loss(*, split="v", axes=("v",), **settings):
    """The loss of a head that four devices split over `v`, as a function of x, head and targets."""
    mesh = jax.make_mesh((4,), ("v",), (AxisType.Auto,), devices=jax.devices()[:4])

    def loss(x, head, targets):
        return linear_cross_entropy(x, head, targets, axes=axes, **settings)[0]

    return jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(None, split), P()), out_specs=P())


def small(dtype=jnp.int32):
    rng = np.random.default_rng(0)
    x, head = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 8), (8, 32)))
    return x, head, np.array([0, 7, 8, 15, 31, 20], dtype)


def test_equal_shards_of_the_vocabulary_need_no_offset():
    x, head, targets = small()
    expected = linear_cross_entropy(x, head, targets)[0]
    np.testing.assert_allclose(split_loss()(x, head, targets), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_targets_may_be_any_integers(dtype):
    x, head, targets = small(dtype)
    expected = linear_cross_entropy(x, head, targets.astype(np.int32))[0]
    with jax.enable_x64(True):
        assert linear_cross_entropy(x, head, jnp.asarray(targets))[0] == expected
        beyond = jnp.asarray(targets).at[0].set(np.iinfo(dtype).max)
        assert np.isnan(linear_cross_entropy(x, head, beyond)[0])


def test_each_token_may_have_a_weight():
    x, head, targets = small()
    weight = np.linspace(0, 1, len(x), dtype=np.float32)
    each = [linear_cross_entropy(x[i : i + 1], head, targets[i : i + 1])[0] for i in range(len(x))]
    found = linear_cross_entropy(x, head, targets, weight=weight)[0]
    np.testing.assert_allclose(found, np.dot(weight, each), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"axes": "v"}, r"^axes='v': must be a list"),
        ({"axes": ("words",)}, r"^axes=\('words',\): 'words' is not manual here"),
        ({"split": None}, r"^axes=\('v',\): head is the same over 'v'"),
        ({"weight": np.ones(5, np.float32)}, r"^weight=\(5,\): must be a scalar, or .*\(6,\)"),
    ],
    ids=["a_name", "no_axis", "not_split", "weight"],
)
def test_a_split_that_would_give_another_loss_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        split_loss(**settings)(*small())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.zeros(20, np.float32)}, r"targets=.*float32.*: must be integers"),
        ({"targets": np.zeros(19, np.int32)}, r"targets=\(19,\): must have the shape \(20,\)"),
        ({"head": np.zeros((600, 12), np.float32)}, r"must be hidden states \[..., D\]"),
    ],
    ids=["float targets", "targets of another shape", "a transposed head"],
)
def test_arrays_that_make_no_loss_are_refused(change, message):
    given = dict(zip(("x", "head", "targets"), inputs(20, 12, 600), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        loss(**given)
