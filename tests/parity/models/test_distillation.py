"""The loss of distillation and its gradients against the textbook form in float64, on meshes and in chunks, from a
teacher that runs and from the k largest probabilities of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.models import loss_chunks
from ultrascale_jax.models.distillation import Form, distillation_loss, largest
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act, gradient_axes

B, T, D, E, V = 4, 8, 16, 24, 32
MESHES = [{"fsdp": 1}, {"fsdp": 2, "sp": 2, "tp": 2}, {"dp": 2, "cp": 2, "sp": 2}]
FORMS = {
    "forward": Form(reverse=False, temperature=2.0, hard_weight=0.3),
    "reverse": Form(reverse=True, temperature=0.5, hard_weight=0.0),
}


def log_softmax(logits):
    highest = np.max(logits, axis=2, keepdims=True)
    return logits - highest - np.log(np.sum(np.exp(logits - highest), axis=2, keepdims=True))


def textbook(form, x, head, targets, teacher_x, teacher_head, k=V):
    """Objective, cross-entropy and divergence, and the gradients of x and head, in float64.

    The divergence is over the teacher's `k` likeliest tokens and the event of all others.
    """
    x, head, teacher_x, teacher_head = map(np.float64, (x, head, teacher_x, teacher_head))
    tau, hard = form.temperature, form.hard_weight
    logits, taught = x @ head, teacher_x @ teacher_head
    weight = 0.01 * (targets >= 0)[:, :, None]
    gold = targets[:, :, None] == np.arange(V)
    logp, logq = log_softmax(logits / tau), log_softmax(taught / tau)
    p = np.exp(logp)
    # An event, a column, is one token, or all that come after the first k.
    events = np.minimum(np.argsort(np.argsort(-logq)), k)[..., None] == np.arange(min(k + 1, V))
    p_of, q_of = (np.einsum("btv,btve->bte", one, events) for one in (p, np.exp(logq)))
    ratio = np.log(p_of) - np.log(q_of)
    kl = np.sum(p_of * ratio if form.reverse else -q_of * ratio, axis=2, keepdims=True)
    slope = ratio if form.reverse else -q_of / p_of
    mean = np.sum(p_of * slope, axis=2, keepdims=True)
    soft = p * (np.einsum("bte,btve->btv", slope, events) - mean) / tau
    nats, divergence = np.sum(weight * gold * -log_softmax(logits)), np.sum(weight * kl)
    share = (1 - hard) * tau**2
    slope = weight * (hard * (np.exp(log_softmax(logits)) - gold) + share * soft)
    grads = slope @ head.T, np.einsum("btd,btv->dv", x, slope)
    return (hard * nats + share * divergence, nats, divergence), grads


def ours(form, k, x, head, targets, teacher_x, teacher_head):
    weight_type = P(None, ("sp", "tp"), reduced=gradient_axes("DV", "BTD"))
    head, teacher_head = (jax.reshard(h, weight_type) for h in (head, teacher_head))
    teacher = gather_sequence(teacher_x, "V"), teacher_head
    if k:
        teacher = largest(*teacher, targets, k, form.temperature)
    arguments = gather_sequence(x, "V"), head, targets, jnp.float32(0.01), teacher
    objective, *parts = distillation_loss(form, *arguments)
    return objective, (parts, teacher if k else None)


def inputs(rng):
    """x, head, targets, and the teacher's two, of another width."""
    shapes = (B, T, D), (D, V), (B, T, E), (E, V)
    x, head, *teacher = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, head, rng.integers(-1, V, (B, T)).astype(np.int32), *teacher


def run(mesh, form, arrays, k=0):
    sizes = MeshConfig.of(**mesh)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    with jax.set_mesh(make_mesh(sizes, devices)):
        hidden, head, ids = act("BRD"), P(None, ("sp", "tp")), act("BT")
        places = hidden, head, ids, hidden, head
        placed = [jax.device_put(*pair) for pair in zip(arrays, places, strict=True)]
        step = jax.value_and_grad(lambda *a: ours(form, k, *a), (0, 1), has_aux=True)
        (objective, (parts, stored)), grads = jax.jit(step)(*placed)
    return (objective, *parts), grads, stored


@pytest.mark.parametrize(
    ("mesh", "form"), [(0, "forward"), (0, "reverse"), (1, "forward"), (2, "reverse")]
)
def test_loss_and_gradients_equal_the_textbook(mesh, form, monkeypatch):
    # Three positions a chunk, the last one filled up.
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", 3 * loss_chunks.DISTILLED * V)
    arrays = inputs(np.random.default_rng(0))
    expected, expected_grads = textbook(FORMS[form], *arrays)
    losses, grads, _ = run(MESHES[mesh], FORMS[form], arrays)
    assert_close(losses, grads, expected, expected_grads)


def assert_close(losses, grads, expected, expected_grads):
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for found, grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(found, grad, atol=1e-5 * np.abs(grad).max())


@pytest.mark.parametrize(
    ("mesh", "form", "k"),
    [(0, "forward", V), (1, "forward", 5), (1, "reverse", V), (2, "reverse", 12)],
)
def test_what_is_stored_of_a_teacher_gives_the_loss_of_k_tokens_and_all_others(
    mesh, form, k, monkeypatch
):
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", 3 * loss_chunks.DISTILLED * V)
    # At a low temperature a student far from the teacher has a gradient that is a small difference of log-ratios.
    arrays, warm = inputs(np.random.default_rng(0)), FORMS[form]._replace(temperature=2.0)
    losses, grads, stored = run(MESHES[mesh], warm, arrays, k)
    assert_close(losses, grads, *textbook(warm, *arrays, k))
    logq = log_softmax(np.float64(arrays[3]) @ arrays[4] / warm.temperature)
    ids = np.argsort(-logq)[..., :k]
    np.testing.assert_array_equal(stored.ids, ids)
    np.testing.assert_allclose(
        stored.logps[..., :k], np.take_along_axis(logq, ids, 2), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(np.exp(stored.logps).sum(2), 1, rtol=1e-5)
