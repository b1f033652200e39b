"""Apply the gate of a gated feed-forward layer: one function for dense layers and for experts."""

from collections.abc import Callable
from typing import assert_never

import jax
import jax.numpy as jnp

from ultrascale_jax.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

type Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""`(gate, up) -> hidden values`, elementwise."""


def gated(activation: Activation | Gate, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """Return the hidden values of a gated layer (arXiv 2002.05202), of any shape, in the type of both.

    Without a gate they are a function of `up`.
    """
    if activation == "relu2":
        return jnp.square(jax.nn.relu(up))
    assert gate is not None
    if callable(activation):
        return activation(gate, up)
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "clamped_swiglu":
            gate = jnp.minimum(gate, SWIGLU_LIMIT)
            up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    assert_never(activation)
