"""Vocabulary-parallel cross-entropy against the textbook form."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.models import loss_chunks
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.loss import (
    cross_entropy,
    cross_entropy_of_shards,
    row_losses,
    token_losses,
)
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act, gradient_axes

B, T, D, V = 4, 8, 16, 32
MESHES = [{"fsdp": 1}, {"fsdp": 2, "sp": 2, "tp": 2}, {"dp": 2, "cp": 2, "sp": 2}]


def on(**sizes):
    """Set a mesh of the first devices."""
    return jax.set_mesh(
        make_mesh(MeshConfig.of(**sizes), jax.devices()[: math.prod(sizes.values())])
    )


def put(x, head, targets):
    """Place the arrays as a step has them."""
    return (
        jax.device_put(x, act("BRD")),
        jax.device_put(head, P(None, ("sp", "tp"))),
        jax.device_put(targets, act("BT")),
    )


def assert_close(got, want, tolerance=1e-6):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * float(np.abs(b).max()))


def inputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    targets = rng.integers(-1, V, (B, T)).astype(np.int32)
    return x, head, targets


def textbook(x, head, targets, z_loss, cotangents=(1.0, 0.0), cap=math.inf):
    """Objective and loss, and the gradients of x and head for these cotangents, in float64."""
    x, head = np.float64(x), np.float64(head)
    logits_BTV = x @ head
    slope_BTV = 1.0
    if cap < math.inf:
        slope_BTV = np.cosh(logits_BTV / cap) ** -2
        logits_BTV = cap * np.tanh(logits_BTV / cap)
    highest_BT1 = np.max(logits_BTV, axis=2, keepdims=True)
    sums_BT1 = np.sum(np.exp(logits_BTV - highest_BT1), axis=2, keepdims=True)
    lse_BT1 = highest_BT1 + np.log(sums_BT1)
    right_BTV = targets[:, :, None] == np.arange(head.shape[1])
    weight_BT1 = 0.01 * (targets >= 0)[:, :, None]
    nll = np.sum(weight_BT1 * lse_BT1) - np.sum(weight_BT1 * right_BTV * logits_BTV)
    p_BTV = np.exp(logits_BTV - lse_BT1)
    of_nll, of_square = sum(cotangents), z_loss * cotangents[0]
    dlogits_BTV = weight_BT1 * (of_nll * (p_BTV - right_BTV) + of_square * 2 * lse_BT1 * p_BTV)
    dlogits_BTV *= slope_BTV
    grads = dlogits_BTV @ head.T, np.einsum("btd,btv->dv", x, dlogits_BTV)
    return (nll + z_loss * np.sum(weight_BT1 * lse_BT1**2), nll), grads


def ours(x, head, targets, z_loss, loss=cross_entropy):
    weight_type = P(None, ("sp", "tp"), reduced=gradient_axes("DV", "BTD"))
    return loss(
        gather_sequence(x), jax.reshard(head, weight_type), targets, jnp.float32(0.01), z_loss
    )


def check(mesh, x, head, targets, *, loss=cross_entropy, words=V, cap=0.0):
    """Compare the loss, with its gradients and without them, with the textbook's of the first `words` columns."""
    expected, (dx, dhead) = textbook(x, head[:, :words], targets, 0.1, cap=cap or math.inf)
    options = (words, cap) if cap else (words,)

    @jax.jit
    def run(*arguments):
        def of(*arguments):
            return ours(*arguments, 0.1, lambda *given: loss(*given, *options))

        return jax.value_and_grad(of, (0, 1), has_aux=True)(*arguments), of(*arguments)

    with on(**mesh):
        (values, grads), without = run(*put(x, head, targets))
    np.testing.assert_allclose([values, without], [expected, expected], rtol=1e-6)
    assert_close(grads, (dx, np.pad(dhead, [(0, 0), (0, V - words)])))
    assert not np.asarray(grads[1])[:, words:].any()


SHARDS = functools.partial(cross_entropy_of_shards, implementation="xla")
LOSSES = {
    "one_chunk": (2**29, cross_entropy),
    "a_chunk_for_each_position": (4 * V, cross_entropy),
    "shards": (2**29, SHARDS),
}


@pytest.mark.parametrize("chosen", LOSSES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_and_gradients_equal_the_textbook(mesh, chosen, monkeypatch):
    chunk_bytes, loss = LOSSES[chosen]
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", chunk_bytes)
    check(mesh, *inputs(), loss=loss)


@pytest.mark.parametrize("chosen", [*LOSSES, "capped"])
def test_columns_after_the_words_count_for_nothing(chosen, monkeypatch, words=13):
    """Four devices split the columns: one has words alone, one both, and two have padding alone."""
    chunk_bytes, loss = LOSSES.get(chosen, (8 * V, cross_entropy))
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", chunk_bytes)
    x, head, targets = inputs()
    head[:, words:] *= 30.0
    targets = np.where(targets < words, targets, -1)
    cap = 6.0 if chosen == "capped" else 0.0
    check(MESHES[1], x, head, targets, loss=loss, words=words, cap=cap)


@pytest.mark.parametrize("scale", [5.0, 95.0])
def test_the_least_likely_targets_have_exact_losses_and_gradients(scale):
    x, head, targets = inputs()
    head *= scale
    least = np.argmin(np.float64(x) @ head, axis=2)
    check(MESHES[1], x, head, np.where(targets >= 0, least, -1).astype(np.int32))


def test_a_last_chunk_that_is_not_full_changes_nothing(monkeypatch):
    x, head, targets = inputs()
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", 4 * V * 3)
    assert loss_chunks.num_chunks(7, V, 4) == 3
    check({"fsdp": 1}, x[:1, :7], head, targets[:1, :7])


def test_losses_of_tokens_in_chunks_have_the_gradients_of_any_function_of_them(
    monkeypatch, words=13
):
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", 4 * V)
    x, head, targets = inputs()
    targets = np.where(targets < words, targets, -1)
    logits = np.float64(x) @ np.float64(head)
    logits[..., words:] = -np.inf
    lse = np.log(np.sum(np.exp(logits), axis=2))
    gold = targets[:, :, None] == np.arange(V)
    nll = np.where(targets >= 0, lse - np.sum(gold[..., :words] * logits[..., :words], axis=2), 0)
    scale = (2 * nll * (targets >= 0))[:, :, None]  # of the sum of their squares
    dlogits = scale * (np.exp(logits - lse[:, :, None]) - gold)
    expected = dlogits @ head.T, np.einsum("btd,btv->dv", x, dlogits)
    with on(**MESHES[2]):

        def squares(x, head, targets):
            weight_type = P(None, ("sp", "tp"), reduced=gradient_axes("DV", "BTD"))
            head = jax.reshard(head, weight_type)
            losses = token_losses(gather_sequence(x), head, targets, words)
            return jnp.sum(jnp.square(losses)), losses

        run = jax.jit(jax.value_and_grad(squares, (0, 1), has_aux=True))
        (_, losses), grads = run(*put(x, head, targets))
    np.testing.assert_allclose(losses, nll, rtol=1e-5, atol=1e-5)
    assert_close(grads, expected, 2e-6)


def test_chunks_bound_the_exponentials_of_a_device():
    vocab_size = 128256 // 2
    for tokens, divides in ((2 * 8192, True), (16381, False)):  # the second is prime
        n = loss_chunks.num_chunks(tokens, vocab_size, 4)
        assert (tokens % n == 0) == divides and 1 < n < 8
        assert tokens // n * vocab_size * 4 <= loss_chunks.CHUNK_BYTES


@pytest.mark.parametrize(("target", "words"), [(V, V), (-2, V), (13, 13)])
@pytest.mark.parametrize("loss", [cross_entropy, SHARDS], ids=["ours", "shards"])
def test_a_target_that_is_no_word_makes_the_loss_nan(loss, target, words):
    x, head, targets = inputs()
    targets = np.where(targets < words, targets, -1)
    targets[0, 3] = target

    @jax.jit
    def run(*arguments):
        def of(*arguments):
            return ours(*arguments, 0.1, lambda *given: loss(*given, words))

        return of(*arguments), jax.value_and_grad(of, (0, 1), has_aux=True)(*arguments)[0]

    with on(fsdp=2, tp=2):
        assert np.isnan(run(*put(x, head, targets))).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_a_narrow_type_are_those_of_its_logits_up_to_rounding(dtype):
    x, head, targets = inputs()
    x, head = x.astype(dtype), head.astype(dtype)
    (expected, _), expected_grads = textbook(x, head, targets, 0.1)
    with on(fsdp=1):
        run = jax.jit(
            lambda x: jax.value_and_grad(ours, (0, 1), has_aux=True)(x, head, targets, 0.1)
        )
        (objective, _), grads = run(jax.device_put(x, act("BRD")))
    np.testing.assert_allclose(objective, expected, rtol=1e-3)
    for a, b in zip(grads, expected_grads, strict=True):
        assert a.dtype == dtype
        off = np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)
        assert off <= float(jnp.finfo(dtype).eps), off


def test_no_value_of_the_program_holds_all_logits(monkeypatch):
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", 4 * V)
    x, head, targets = inputs()
    with on(fsdp=1):
        args = jax.device_put(x, act("BRD")), jax.device_put(head, P(None, ("sp", "tp"))), targets
        program = (
            jax.jit(jax.grad(ours, has_aux=True), static_argnums=3).lower(*args, 0.0).as_text()
        )
    assert f"tensor<{B * T}x{V}xf32>" not in program
    assert f"tensor<1x{V}xf32>" in program


@pytest.mark.parametrize("chunk_bytes", [2**29, 4 * V], ids=["one_chunk", "several"])
def test_rows_have_their_sums_and_whether_no_token_is_likelier(chunk_bytes, monkeypatch, words=13):
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", chunk_bytes)
    x, head, targets = inputs()
    logits = (np.float64(x) @ np.float64(head))[..., :words]
    targets = np.where(targets < words, targets, -1)
    best = logits.argmax(axis=2)
    targets[:2] = np.where(targets[:2] < 0, -1, best[:2])  # the likeliest where a token counts
    targets[1, 3] = (best[1, 3] + 1) % words  # but for one
    nll = np.log(np.exp(logits).sum(axis=2))
    nll -= np.take_along_axis(logits, np.maximum(targets, 0)[..., None], axis=2)[..., 0]
    with on(dp=2, cp=2, sp=2):
        place = {"x": act("BRD"), "head": act("DV"), "targets": act("BT")}
        given = {"x": x, "head": head, "targets": targets}
        given = {name: jax.device_put(value, place[name]) for name, value in given.items()}
        weight_type = P(None, ("sp", "tp"), reduced=gradient_axes("DV", "BTD"))
        found, likeliest = jax.jit(
            lambda x, head, targets: row_losses(
                gather_sequence(x), jax.reshard(head, weight_type), targets, words
            )
        )(**given)
    np.testing.assert_allclose(found, np.where(targets >= 0, nll, 0).sum(axis=1), rtol=1e-5)
    assert np.asarray(likeliest).tolist() == [True, False, False, False]
