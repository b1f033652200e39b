"""Works of the trial at a run's start: what its layers compute either by our kernels or by XLA, forward and backward.

XLA's side is the code that a run takes without the kernel, not a kernel's own definition: the loss by chunks of tokens,
the experts with padded products, each with all that stands around its products.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ultrascale_jax.cli.bench_peers.works import (
    BF16,
    BF16_DOT,
    COPY,
    FP8,
    MOSAIC,
    XLA,
    Work,
    normals,
    uneven_sizes,
)
from ultrascale_jax.config import Experts, MoEConfig
from ultrascale_jax.models.fp8 import Recipe, batched
from ultrascale_jax.models.layers import gather_sequence, rms_norm
from ultrascale_jax.models.loss import cross_entropy, cross_entropy_of_pieces
from ultrascale_jax.parallel.experts.exchange import expert_layer
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import gather_param
from ultrascale_jax.sharding.rules import act, stored_spec

_compared = functools.partial(Work, contestants=(XLA, MOSAIC))


def layer_norm(M: int, D: int) -> list[Work]:
    """Return the backward pass of a norm of `[M, D]`, with the addition of the residual stream's gradient.

    XLA adds it in the same pass, and the kernel leaves it to another one.
    """

    def make(key) -> tuple:
        return *normals(key, *[(1, M, D)] * 3), jnp.linspace(0.5, 1.5, D, dtype=jnp.float32)

    def backward(name: Any, x, dx, dy, weight) -> tuple:
        x, dx, dy = (jax.reshard(a, act("BRD")) for a in (x, dx, dy))

        def norm(x, weight):
            weight = gather_param(weight, "D", "BRD", weight.dtype, {"D": D})
            return rms_norm(x, weight, "D", "BRD", 1e-5, name)

        more, dw = jax.vjp(norm, x, weight)[1](dy)
        return dx + more, dw

    return [_compared(name="layer_norm", make=make, run=backward, limit=COPY, amount=4 * M * D * 2)]


def layer_loss(M: int, D: int, V: int) -> list[Work]:
    """Return the head with the cross-entropy of `[M, D]` hidden states."""

    def make(key) -> tuple:
        x, head = normals(key, (1, M, D), (D, V))
        return x, head * D**-0.5, jax.random.randint(key, (1, M), -1, V, jnp.int32)

    def both(name: str, x, head, targets) -> tuple:
        loss = cross_entropy_of_pieces if name == MOSAIC else cross_entropy

        def objective(x, head):
            x = gather_sequence(x, "V")
            return loss(x, gather_param(head, "DV", "BTD", x.dtype, {"D": D}), targets, weight, 0.0)

        weight = jnp.float32(1 / M)
        x, head = jax.reshard(x, act("BRD")), jax.reshard(head, stored_spec("DV", head.shape))
        (value, bare), grads = jax.value_and_grad(objective, (0, 1), has_aux=True)(x, head)
        return value, bare, *grads

    return [_compared(name="layer_loss", make=make, run=both, limit=BF16, amount=3 * 2 * M * D * V)]


def layer_experts(n: int, E: int, D: int, F: int, capacity_factor: float) -> list[Work]:
    """Return the experts of a device, whose `n` rows are spread over `E` of them unevenly."""
    experts = Experts(num=E, top_k=1, d_ff=F)
    moe = MoEConfig(capacity_factor=capacity_factor)

    def make(key) -> tuple:
        ids = jnp.repeat(jnp.arange(E, dtype=jnp.int32), uneven_sizes(n, E), total_repeat_length=n)
        x, w_gate, w_up, w_down, dy = normals(key, (n, D), (E, D, F), (E, D, F), (E, F, D), (n, D))
        matrices = w_gate * D**-0.5, w_up * D**-0.5, w_down * F**-0.5
        return x, *matrices, jax.random.permutation(key, ids)[:, None], dy

    def both(name: str, *arrays) -> tuple:
        product = None if name == MOSAIC else jnp.einsum
        *floats, ids, dy = (jax.reshard(a, P("ep")) for a in arrays)

        def local(x, w_gate, w_up, w_down, ids):
            given = x, ids, jnp.ones(ids.shape, jnp.float32), w_gate, w_up, w_down
            return expert_layer(*given, moe=moe, experts=experts, product=product)[0]

        layer = smap(local, in_specs=P("ep"), out_specs=P("ep"))
        y, pull_back = jax.vjp(lambda *floats: layer(*floats, ids), *floats)
        return y, *pull_back(dy)

    return [
        _compared(
            name="layer_experts", make=make, run=both, limit=BF16, amount=3 * 3 * 2 * n * D * F
        )
    ]


def layer_fp8_block(M: int, N: int, K: int) -> list[Work]:
    """Return the product of `[M, K]` and `[K, N]` with scales for blocks, quantisers included, beside bfloat16's."""

    def make(key) -> tuple:
        return normals(key, (M, K), (K, N), (M, N))

    def both(name: str, x, w, dy) -> tuple:
        recipe = Recipe(scaling="block", gradients="e4m3", wgrad="fp8", implementation=name)
        multiply = jnp.matmul if name == BF16_DOT else functools.partial(batched, recipe)
        y, pull_back = jax.vjp(multiply, x, w)
        return y, *pull_back(dy)

    amount, sides = 3 * 2 * M * N * K, (XLA, MOSAIC, BF16_DOT)
    return [
        Work(
            name="layer_fp8_block", contestants=sides, make=make, run=both, limit=FP8, amount=amount
        )
    ]


LAYER_WORKS: dict[str, Callable[..., list[Work]]] = {
    "layer_norm": layer_norm,
    "layer_loss": layer_loss,
    "layer_experts": layer_experts,
    "layer_fp8_block": layer_fp8_block,
}
