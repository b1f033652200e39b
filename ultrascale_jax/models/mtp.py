"""One module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    hidden state of position i --- norm --|
                                          |- side by side - w_join - one layer - norm - the model's own head
    embedding of token i + k ----- norm --|

Module k predicts token i + k + 1. Its hidden states are those after a norm: the model's final one for the first module,
the module's own for the next, as Megatron-Core trains and vLLM serves them. Embedding and head are the model's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ultrascale_jax.config import KernelsConfig, ModelConfig
from ultrascale_jax.models.block import Block, Layers, normed
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import gather_params, param, zero_sizes
from ultrascale_jax.models.linear import linear
from ultrascale_jax.models.moe import Routed


class MTPModule(nnx.Module):
    """Two norms, a projection, a layer like the model's last, and the norm before the head."""

    def __init__(self, layers: Layers, cfg: ModelConfig, key: jax.Array, kernels: KernelsConfig):
        self.cfg, self.kernels, D = cfg, kernels, cfg.d_model
        k_block, k_join = jax.random.split(key)
        self.token_norm, self.hidden_norm = layers.make_norm(cfg), layers.make_norm(cfg)
        self.w_join = param(k_join, "PD", "BRP", (2 * D, D))
        self.block = Block(layers, cfg, cfg.num_layers - 1, kernels, k_block)
        self.norm = layers.make_norm(cfg)

    def __call__(
        self, x_BRD: jax.Array, token_BRD: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Routed | None]:
        """Map hidden states and embeddings `[B, R, D]` to hidden states after the norm; parameters as they are stored.

        The second result is what the router of experts did, if there is one. `inputs` are the last layer's,
        without a cache. Each device of a tensor group projects its own part of the residual stream, in the type of
        compute.
        """
        with jax.named_scope("join"):
            sides = (token_BRD, self.token_norm), (x_BRD, self.hidden_norm)
            x_BRP = jnp.concatenate([self._normed(*side) for side in sides], axis=-1)
            w_join = gather_params(self.w_join, inputs.dtype, zero_sizes(self.cfg))
            x_BRD = linear("BRP,PD->BRD", x_BRP, w_join[...])
        x_BRD, routed, *_ = self.block.gather_params(inputs)(x_BRD, inputs)
        return self._normed(x_BRD, self.norm), routed

    def _normed(self, x_BRD: jax.Array, norm: Any) -> jax.Array:
        norm = gather_params(norm, x_BRD.dtype, zero_sizes(self.cfg))
        return normed(x_BRD, norm, self.cfg, self.kernels)
