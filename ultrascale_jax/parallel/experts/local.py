"""Compute one round of this rank's experts on local rows, by padded batched products or the grouped kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config.model import Activation
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul
from ultrascale_jax.parallel.adapted import Adapted, base_of, low_rank, with_base
from ultrascale_jax.parallel.experts.dispatch import Assignment, Slots, combine, dispatch
from ultrascale_jax.parallel.gate import Gate, gated

type Product = Callable[[str, jax.Array, jax.Array], jax.Array]
"""`(subscripts, rows, matrices)` as `jnp.einsum` takes them: `[E, C, D]` or `[E, C, F]` times `[D, E, F]`."""

type OneRound = Callable[[int, jax.Array, Assignment, tuple[Any, Any]], jax.Array]
"""`(size, start, assignment, ((x, weights), params)) -> sums [n, D]` of at most `size` rows, of each expert or of all,
from number `start` on."""

type ExpertFunction = Callable[[Any, jax.Array], jax.Array]
"""`(params, x_ECD) -> y_ECD`: each of E experts maps its C rows."""


def model_dim_first(matrices: Sequence[Any]) -> list[Any]:
    """Return w_gate, w_up and w_down as `[D, E, F]`, and biases, or None, as they are.

    So they lie in memory where ZeRO-3 has gathered them over D. Products take them so, but a loop or a kernel that gets
    `[E, D, F]` has them turned first: 13.75 s instead of 13.44 for Mixtral on 64 GPUs with fsdp=64 (simulated).
    """
    *hidden, w_down = matrices

    def turned(w: Any, dim: int) -> Any:
        if w is None or base_of(w).ndim < 3:
            return w
        return with_base(w, jnp.moveaxis(base_of(w), dim, 0))

    return [*(turned(w, 1) for w in hidden), turned(w_down, 2)]


def _multiply(product: Product, subscripts: str, x: jax.Array, w: Any) -> jax.Array:
    """Multiply rows by matrices, and by the adapter that they have."""
    y = product(subscripts, x, base_of(w))
    return y + low_rank(subscripts, x, w) if isinstance(w, Adapted) else y


def take_weights(weights: jax.Array, slots: Slots) -> jax.Array:
    """Return the weight `[S]` of the choice in each slot, of `[n, k]`."""
    return dispatch(weights.reshape(-1, 1), slots.choice, slots.slot.reshape(-1, 1))[:, 0]


def padded_experts(
    product: Product,
    activation: Activation | Gate,
    size: int,
    start: jax.Array,
    assignment: Assignment,
    floats,
) -> jax.Array:
    """Compute at most `size` rows of each expert, from its row number `start` on, by batched products."""
    (x, weights), (w_gate, w_up, *biases, w_down) = floats
    slots = assignment.padded(start, size)
    D = base_of(w_up).shape[0]
    x_ECD = dispatch(x[:, :D], slots.token, slots.slot).reshape(-1, size, D)
    gate_ECF, up_ECF = (
        None if w is None else _multiply(product, "ECD,DEF->ECF", x_ECD, w) for w in (w_gate, w_up)
    )
    if biases:
        b_gate, b_up = (bias.astype(x.dtype)[:, None] for bias in biases)
        gate_ECF, up_ECF = gate_ECF + b_gate, up_ECF + b_up
    gate_ECF, up_ECF = checkpoint_name(gate_ECF, "gate"), checkpoint_name(up_ECF, "up")
    weight_EC = take_weights(weights, slots).reshape(-1, size)
    h_ECF = _weighed_gate(activation, gate_ECF, up_ECF, weight_EC)
    y_ECD = _multiply(product, "ECF,DEF->ECD", h_ECF, w_down)
    return combine(y_ECD.reshape(-1, D), slots.token, slots.slot)


def mapped_experts(
    expert: ExpertFunction,
    d_model: int,
    size: int,
    start: jax.Array,
    assignment: Assignment,
    floats,
) -> jax.Array:
    """Apply a function to at most `size` rows of each expert, from its row number `start` on."""
    (x, weights), params = floats
    slots = assignment.padded(start, size)
    rows = dispatch(x[:, :d_model], slots.token, slots.slot)
    # A norm of zeros has no gradient, and times a weight of 0 it would be NaN.
    is_filled = slots.choice[:, None] < slots.slot.size
    x_ECD = jnp.where(is_filled, rows, jnp.ones((), x.dtype)).reshape(-1, size, d_model)
    y_ECD = expert(params, x_ECD)
    if y_ECD.shape != x_ECD.shape:
        raise ValueError(f"expert: returns {y_ECD.shape} for x {x_ECD.shape}; want the same shape")
    weight_EC = take_weights(weights, slots).reshape(-1, size)
    weighted = (y_ECD.astype(jnp.float32) * weight_EC[..., None]).astype(x.dtype)
    return combine(weighted.reshape(-1, d_model), slots.token, slots.slot)


def ragged_experts(
    activation: Activation | Gate, size: int, start: jax.Array, assignment: Assignment, floats
) -> jax.Array:
    """Compute at most `size` rows of all experts together, from number `start` on, by the grouped kernel."""
    (x, weights), (w_gate, w_up, w_down) = floats
    slots, sizes = assignment.ragged(start, size)
    product = functools.partial(grouped_matmul, sizes=sizes, implementation="mosaic")
    x_SD = dispatch(x[:, : w_up.shape[0]], slots.token, slots.slot)
    gate_SF = None if w_gate is None else checkpoint_name(product(x_SD, w_gate), "gate")
    up_SF = checkpoint_name(product(x_SD, w_up), "up")
    h_SF = _weighed_gate(activation, gate_SF, up_SF, take_weights(weights, slots))
    return combine(product(h_SF, w_down, transposed=True), slots.token, slots.slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighed_gate(
    activation: Activation | Gate, gate: jax.Array | None, up: jax.Array, weight: jax.Array
) -> jax.Array:
    """Return the hidden values `[..., F]` of gate and up, times the weights `[...]` of their rows, in up's type.

    Its backward pass keeps gate and up alone, and reads them and the gradient once.
    """
    hidden = gated(activation, gate, up).astype(jnp.float32)
    return (hidden * weight[..., None]).astype(up.dtype)


def _weighed_gate_backward(activation, saved, g):
    gate, up, weight = saved
    hidden, pull_back = jax.vjp(functools.partial(gated, activation), gate, up)
    g = g.astype(jnp.float32)
    d_weight = jnp.sum(g * hidden.astype(jnp.float32), axis=-1)
    return *pull_back((g * weight[..., None]).astype(hidden.dtype)), d_weight


_weighed_gate.defvjp(
    lambda activation, *operands: (_weighed_gate(activation, *operands), operands),
    _weighed_gate_backward,
)
