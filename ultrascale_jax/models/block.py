"""One layer of the decoder: attention and a feed-forward layer, each with its norm and residual connection."""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import KernelsConfig, ModelConfig, MoEConfig
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.config.model import FeedForward
from ultrascale_jax.models.attention import Attention
from ultrascale_jax.models.fp8 import in_fp8, is_variable
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import (
    MLP,
    gather_fp8,
    gather_param,
    param,
    rms_norm,
    scatter_sequence,
)
from ultrascale_jax.models.mla import MLA
from ultrascale_jax.models.moe import MoE, Routed
from ultrascale_jax.sharding.primitives import grad_barrier
from ultrascale_jax.sharding.rules import TENSOR, mesh_size

ATTENTION = ("attn_norm", "attn", "mlp_norm")
PARTS = (*ATTENTION, "mlp", "moe")


def _grads_together[Tree](tree: Tree) -> Tree:
    """`grad_barrier` with a tensor group; without one there is no reduce-scatter to hide."""
    return grad_barrier(tree) if mesh_size(*TENSOR) > 1 else tree


def cut[Tree](stack: Tree, start: int, stop: int) -> Tree:
    """Layers from `start` up to `stop` of a stack; the whole as it is."""
    return jax.tree.map(lambda p: p if p.shape[0] == stop - start else p[start:stop], stack)


class Block(nnx.Module):
    """Attention and MLP or experts, each with its norm and residual connection.

    Also the form of a model's stacks, which are homogeneous: attention and norms of every layer, `mlp` of the dense
    layers and `moe` of the others, each as long as there are such layers. `layers` cuts a stack of whole layers out.
    """

    attn: Attention | MLA

    def __init__(self, cfg: ModelConfig, kernels: KernelsConfig = AUTO, **parts: Any):
        """`parts` are `attn_norm`, `attn`, `mlp_norm`, `mlp` and `moe`, or some of them."""
        self.cfg, self.kernels = cfg, kernels
        for name, part in parts.items():
            setattr(self, name, part)

    @classmethod
    def init_attention(cls, cfg: ModelConfig, kernels: KernelsConfig, key: jax.Array) -> "Block":
        """A layer without its feed-forward layer."""
        attention = Attention if cfg.latent is None else MLA
        return cls(
            cfg,
            kernels,
            attn_norm=param(None, "D", "BRD", (cfg.d_model,), std=1),
            attn=attention(cfg, jax.random.split(key)[0], kernels),
            mlp_norm=param(None, "D", "BRD", (cfg.d_model,), std=1),
        )

    @staticmethod
    def init_feed_forward(
        kind: FeedForward, cfg: ModelConfig, kernels: KernelsConfig, key: jax.Array
    ) -> MLP | MoE:
        """The feed-forward layer of the layer that `init_attention` makes of the same key."""
        key = jax.random.split(key)[1]
        return MLP(cfg, key) if kind == "mlp" else MoE(cfg, key, kernels=kernels)

    @property
    def parts(self) -> dict[str, Any]:
        """Its parts by name."""
        return {name: getattr(self, name) for name in PARTS if hasattr(self, name)}

    def only(self, *names: str) -> "Block":
        """The same block with these parts alone, as far as it has them."""
        return Block(
            self.cfg, self.kernels, **{n: part for n, part in self.parts.items() if n in names}
        )

    def layers(self, kind: FeedForward, size: int, first: int, row: int) -> "Block":
        """Of stacks, `size` layers with this feed-forward layer: their attention from position `first` on, their
        feed-forward layers from `row` on."""
        attention = cut(self.only(*ATTENTION), first, first + size)
        feed_forward = cut(self.parts[kind], row, row + size)
        return Block(self.cfg, self.kernels, **attention.parts, **{kind: feed_forward})

    def gathered(self, inputs: LayerInputs) -> "Block":
        """Its parameters as they are used: ZeRO-3's all-gathers of one layer; in fp8 as its products want them."""

        def leaf(path, param):
            given, fp8 = (
                (param.get_value(), param.dims, param.act_dims, inputs.dtype, self.cfg),
                inputs.fp8,
            )
            if fp8 is None or not in_fp8(param.dims):
                return param.replace(gather_param(*given))
            amax = fp8.amaxes.get(jax.tree_util.keystr(path, simple=True, separator="."))
            return param.replace(gather_fp8(*given, fp8.recipe, amax))

        return jax.tree.map_with_path(leaf, self, is_leaf=is_variable)

    def __call__(
        self, x_BRD: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Routed | None, Cache | None]:
        """`[B, R, D]` to `[B, R, D]`; parameters as `gathered` returns them, with one feed-forward layer.

        The second result is what the router of experts did, if there is one; the third the cache.

        Backward, the reduce-scatter out of the MLP and the all-gather into attention run beside the MLP's weight
        gradients, and the reduce-scatter out of attention beside attention's.
        """
        kind = "moe" if hasattr(self, "moe") else "mlp"
        x_BRD, cache, feed_forward = self.attend(x_BRD, inputs, getattr(self, kind))
        return *self.feed(x_BRD, feed_forward, inputs.moe), cache

    def attend(self, x_BRD: jax.Array, inputs: LayerInputs, feed_forward=None):
        """The first half: the residual stream, the cache, and `feed_forward`, which is to be used after it."""
        post = self.cfg.norm_placement == "post"
        with jax.named_scope("attention"):
            h = x_BRD if post else self._norm(x_BRD, "attn_norm")
            h, attn = _grads_together((h, self.attn))
            h, cache = attn(h, inputs)
            h, feed_forward = _grads_together((h, feed_forward))
            h = checkpoint_name(scatter_sequence(h), "attn_out")
            return x_BRD + (self._norm(h, "attn_norm") if post else h), cache, feed_forward

    def feed(
        self, x_BRD: jax.Array, feed_forward: MLP | MoE, moe: MoEConfig
    ) -> tuple[jax.Array, Routed | None]:
        """The second half: the residual stream, and what the router of experts did."""
        post, routed = self.cfg.norm_placement == "post", None
        with jax.named_scope("moe" if isinstance(feed_forward, MoE) else "mlp"):
            h = x_BRD if post else self._norm(x_BRD, "mlp_norm")
            if isinstance(feed_forward, MoE):
                h, routed = feed_forward(h, moe)
            else:
                h = feed_forward(h)
            h = checkpoint_name(h, "mlp_out")
            return x_BRD + (self._norm(h, "mlp_norm") if post else h), routed

    def _norm(self, x_BRD: jax.Array, name: str) -> jax.Array:
        weight = getattr(self, name)[...]
        settings = self.cfg.norm_eps, self.kernels.norm
        return checkpoint_name(rms_norm(x_BRD, weight, "D", "BRD", *settings), name)
