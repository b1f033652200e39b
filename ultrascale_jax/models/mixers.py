"""The attention of a layer: one mixer of tokens, or attention and linear attention side by side."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ultrascale_jax.config import KernelsConfig, ModelConfig
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.config.model import Mixer
from ultrascale_jax.models.attention import Attention
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.linear_attention import LinearAttention
from ultrascale_jax.models.mamba import Mamba2
from ultrascale_jax.models.mla import MLA

MIXERS: dict[Mixer, Callable[..., Any]] = {
    "attention": Attention,
    "latent": MLA,
    "delta": LinearAttention,
    "mamba2": Mamba2,
}
"""The built-in attention of each kind."""


class SideBySide(nnx.Module):
    """Attention and linear attention that read the same input, and whose results are added (Falcon-H1)."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, kernels: KernelsConfig = AUTO):
        assert cfg.linear is not None
        k_attention, k_linear = jax.random.split(key)
        self.attention = Attention(cfg, k_attention, kernels)
        self.linear = MIXERS[cfg.linear.rule](cfg, k_linear, kernels)

    def __call__(self, x_BRD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """Map `[B, R, D]` to partial sums `[B, T, D]` of the tensor group, and return the cache: attention's two parts,
        linear attention's, and the number of tokens."""
        x_BTD, cache = gather_sequence(x_BRD), inputs.cache
        parts = (None, None) if cache is None else ((*cache[:2], cache[-1]), cache[2:])
        mixers = self.attention, self.linear
        (full_BTD, keys), (linear_BTD, states) = (
            mixer.mix(x_BTD, dataclasses.replace(inputs, cache=part))
            for mixer, part in zip(mixers, parts, strict=True)
        )
        kept = None if keys is None or states is None else (*keys[:-1], *states)
        return full_BTD + linear_BTD, kept


def mixer(cfg: ModelConfig, layer: int) -> Callable[..., Any]:
    """Return the class of the attention of a layer that has one."""
    kinds = cfg.mixers(layer)
    return MIXERS[kinds[0]] if len(kinds) == 1 else SideBySide
