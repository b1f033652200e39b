"""The loss of distillation and its gradients against the textbook form in float64, on meshes and in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.models import loss_chunks
from ultrascale_jax.models.distillation import Form, distillation_loss
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


def textbook(form, x, head, targets, teacher_x, teacher_head):
    """Objective, cross-entropy and divergence, and the gradients of x and head, in float64."""
    x, head, teacher_x, teacher_head = map(np.float64, (x, head, teacher_x, teacher_head))
    tau, hard = form.temperature, form.hard_weight
    logits, taught = x @ head, teacher_x @ teacher_head
    weight = 0.01 * (targets >= 0)[:, :, None]
    gold = targets[:, :, None] == np.arange(V)
    logp, logq = log_softmax(logits / tau), log_softmax(taught / tau)
    p, q = np.exp(logp), np.exp(logq)
    kl = np.sum(p * (logp - logq) if form.reverse else q * (logq - logp), axis=2, keepdims=True)
    soft = p * (logp - logq - kl) / tau if form.reverse else (p - q) / tau
    nats, divergence = np.sum(weight * gold * -log_softmax(logits)), np.sum(weight * kl)
    share = (1 - hard) * tau**2
    slope = weight * (hard * (np.exp(log_softmax(logits)) - gold) + share * soft)
    grads = slope @ head.T, np.einsum("btd,btv->dv", x, slope)
    return (hard * nats + share * divergence, nats, divergence), grads


def ours(form, x, head, targets, teacher_x, teacher_head):
    weight_type = P(None, ("sp", "tp"), reduced=gradient_axes("DV", "BTD"))
    head, teacher_head = (jax.reshard(h, weight_type) for h in (head, teacher_head))
    objective, *parts = distillation_loss(
        form,
        gather_sequence(x, "V"),
        head,
        targets,
        jnp.float32(0.01),
        (gather_sequence(teacher_x, "V"), teacher_head),
    )
    return objective, parts


def inputs(rng):
    """x, head, targets, and the teacher's two, of another width."""
    shapes = (B, T, D), (D, V), (B, T, E), (E, V)
    x, head, *teacher = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, head, rng.integers(-1, V, (B, T)).astype(np.int32), *teacher


def run(mesh, form, arrays):
    sizes = MeshConfig.of(**mesh)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    with jax.set_mesh(make_mesh(sizes, devices)):
        hidden, head, ids = act("BRD"), P(None, ("sp", "tp")), act("BT")
        places = hidden, head, ids, hidden, head
        placed = [jax.device_put(*pair) for pair in zip(arrays, places, strict=True)]
        step = jax.value_and_grad(lambda *a: ours(form, *a), (0, 1), has_aux=True)
        (objective, parts), grads = jax.jit(step)(*placed)
    return (objective, *parts), grads


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_and_gradients_equal_the_textbook(mesh, form, monkeypatch):
    # Three positions a chunk, the last one filled up.
    monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", 3 * loss_chunks.DISTILLED * V)
    arrays = inputs(np.random.default_rng(0))
    expected, expected_grads = textbook(FORMS[form], *arrays)
    losses, grads = run(mesh, FORMS[form], arrays)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for found, grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(found, grad, atol=1e-5 * np.abs(grad).max())


@pytest.mark.parametrize("reverse", [False, True])
def test_a_teacher_equal_to_the_student_has_neither_divergence_nor_gradient(reverse):
    x, head, targets, *_ = inputs(np.random.default_rng(0))
    form = Form(reverse=reverse, temperature=2.0, hard_weight=0.0)
    (objective, _, divergence), grads = run(MESHES[1], form, (x, head, targets, x, head))
    assert objective == divergence == 0
    assert not any(np.asarray(grad).any() for grad in grads)
