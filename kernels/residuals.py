"""Name the arrays that a fused attention needs again for its backward pass, so that a remat policy can keep them."""

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION_RESIDUAL = "attention_residual"
"""The second name of each, for the policies that keep attention's residuals, whatever the kernel."""


def name_attention(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return attention's result and its log-sum-exp under the names `attn_core` and `ATTENTION_RESIDUAL`.

    A policy that keeps one of the two names keeps one copy, and attention does not run again.
    """
    return tuple(
        checkpoint_name(checkpoint_name(x, "attn_core"), ATTENTION_RESIDUAL) for x in arrays
    )
