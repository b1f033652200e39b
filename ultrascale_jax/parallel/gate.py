"""Apply the gate of a gated feed-forward layer: one function for dense layers and for experts."""

import jax

from ultrascale_jax.config.model import Activation


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return `activation(gate) * up`, of any shape, in the type of both (arXiv 2002.05202)."""
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up
