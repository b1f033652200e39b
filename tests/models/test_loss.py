"""Vocabulary-parallel cross-entropy against the textbook form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.models import loss as loss_module
from ultrascale_jax.models.layers import gather_sequence, gradient_axes
from ultrascale_jax.models.loss import cross_entropy, cross_entropy_of_pieces, num_chunks
from ultrascale_jax.sharding import act

B, T, D, V = 4, 8, 16, 32
MESHES = [{"fsdp": 1}, {"fsdp": 2, "sp": 2, "tp": 2}, {"dp": 2, "cp": 2, "sp": 2}]


def inputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    targets = rng.integers(-1, V, (B, T)).astype(np.int32)
    return x, head, targets


def textbook(x, head, targets, z_loss):
    logits = jnp.einsum("btd,dv->btv", x, head)
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    z = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    counted = targets >= 0
    return 0.01 * jnp.sum(jnp.where(counted, nll + z, 0.0)), 0.01 * jnp.sum(
        jnp.where(counted, nll, 0.0)
    )


def ours(x, head, targets, z_loss, loss=cross_entropy):
    weight_type = P(None, ("sp", "tp"), reduced=gradient_axes("DV", "BTD"))
    return loss(
        gather_sequence(x), jax.reshard(head, weight_type), targets, jnp.float32(0.01), z_loss
    )


LOSSES = {
    "one_chunk": (2**29, cross_entropy),
    "a_chunk_for_each_position": (4 * V, cross_entropy),
    "pieces": (2**29, functools.partial(cross_entropy_of_pieces, implementation="xla")),
}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", LOSSES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_and_gradients_equal_the_textbook(mesh, chosen, monkeypatch):
    chunk_bytes, loss = LOSSES[chosen]
    ours_of = functools.partial(ours, loss=loss)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    x, head, targets = inputs()
    (expected, bare), expected_grads = jax.value_and_grad(textbook, (0, 1), has_aux=True)(
        x, head, targets, 0.1
    )
    with jax.set_mesh(
        make_mesh(
            MeshConfig(**{"fsdp": 1, **mesh}), jax.devices()[: int(np.prod(list(mesh.values())))]
        )
    ):
        args = (
            jax.device_put(x, act("BRD")),
            jax.device_put(head, P(None, ("sp", "tp"))),
            jax.device_put(targets, act("BT")),
        )
        grad = jax.jit(jax.value_and_grad(ours_of, (0, 1), has_aux=True), static_argnums=3)
        (objective, nll), grads = grad(*args, 0.1)
        without = jax.jit(ours_of, static_argnums=3)(*args, 0.1)
    np.testing.assert_allclose([objective, nll], [expected, bare], rtol=1e-6)
    np.testing.assert_allclose(without, [expected, bare], rtol=1e-6)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(b).max()) + 1e-7)


def test_the_gradient_follows_the_cotangent():
    x, head, targets = inputs()
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])):
        args = jax.device_put(x, act("BRD")), jax.device_put(head, P(None, ("sp", "tp"))), targets
        one = jax.jit(jax.grad(lambda *a: ours(*a, 0.0)[0]))(*args)
        three = jax.jit(jax.grad(lambda *a: 3.0 * ours(*a, 0.0)[0]))(*args)
    np.testing.assert_allclose(three, 3.0 * one, rtol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_each_of_the_two_losses_has_its_own_gradient(z_loss):
    x, head, targets = inputs()

    def gradients(losses, x, head):
        def bare(x, head):
            return losses(x, head, targets, z_loss)[1]

        def both(x, head):
            objective, nll = losses(x, head, targets, z_loss)
            return 2.0 * objective + 3.0 * nll

        return [jax.jit(jax.grad(loss, (0, 1)))(x, head) for loss in (bare, both)]

    want = gradients(textbook, x, head)
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tp=2), jax.devices()[:4])):
        placed = jax.device_put(x, act("BRD")), jax.device_put(head, P(None, ("sp", "tp")))
        got = gradients(ours, *placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(b).max()) + 1e-7)


def test_chunks_bound_the_logits_of_a_device():
    mesh = MeshConfig(fsdp=4, tp=2)
    with jax.set_mesh(make_mesh(mesh)):
        n = num_chunks(8, 8192, 128256)
    assert 2 * 8192 // n * 128256 // 2 * 4 <= loss_module.CHUNK_BYTES
    assert 8192 % n == 0


def test_no_value_of_the_program_holds_all_logits(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * V)
    x, head, targets = inputs()
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])):
        args = jax.device_put(x, act("BRD")), jax.device_put(head, P(None, ("sp", "tp"))), targets
        program = (
            jax.jit(jax.grad(ours, has_aux=True), static_argnums=3).lower(*args, 0.0).as_text()
        )
    assert f"tensor<{B}x{T}x{V}xf32>" not in program
    assert f"tensor<{B}x1x{V}xf32>" in program
