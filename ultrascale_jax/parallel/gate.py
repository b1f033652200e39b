"""Apply the gate of a gated feed-forward layer: one function for dense layers and for experts."""

from typing import assert_never

import jax
import jax.numpy as jnp

from ultrascale_jax.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the hidden values of a gated layer (arXiv 2002.05202), of any shape, in the type of both."""
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
