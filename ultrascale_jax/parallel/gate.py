"""Apply the gate of a gated feed-forward layer: one function for dense layers and for experts."""

import jax
import jax.numpy as jnp

from ultrascale_jax.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the hidden values of a gated layer (arXiv 2002.05202), of any shape, in the type of both."""
    if activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up
