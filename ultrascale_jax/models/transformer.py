"""The decoder: embedding, a scan over stacked blocks, final norm, head.

Modules are plain pytrees. A block is made once under `jax.vmap` over its init keys, so each of its parameters has a
leading L, and `jax.lax.scan` runs it: compile time does not grow with depth. Under ZeRO-3 a block gathers its own
parameters as the first thing it does, inside the scan, so that XLA moves one layer at a time.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import ContextConfig, ModelConfig
from ultrascale_jax.models.attention import Attention, Cache
from ultrascale_jax.models.layers import (
    MLP,
    gather_param,
    gather_sequence,
    look_up,
    map_params,
    param,
    rms_norm,
    scatter_sequence,
    together,
)
from ultrascale_jax.models.loss import cross_entropy
from ultrascale_jax.models.rotary import rotary
from ultrascale_jax.sharding import einsum, reshard, stored

NATURAL = ContextConfig(strategy="ring")
"""Context parallelism for sequences in natural order."""


class Block(nnx.Module):
    """Attention and MLP, each with its norm and residual connection."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        self.cfg = cfg
        k_attn, k_mlp = jax.random.split(key)
        self.attn_norm = param(None, "D", "BRD", (cfg.d_model,), std=1)
        self.attn = Attention(cfg, k_attn)
        self.mlp_norm = param(None, "D", "BRD", (cfg.d_model,), std=1)
        self.mlp = MLP(cfg, k_mlp)

    def gathered(self, dtype: jax.typing.DTypeLike) -> "Block":
        """Its parameters as they are used: ZeRO-3's all-gathers of one layer."""

        def leaf(value, dims, on):
            return gather_param(value, dims, on, dtype, self.cfg.d_model)

        return map_params(leaf, self)

    def __call__(
        self,
        x_BRD: jax.Array,
        rope,
        segment_ids_BT=None,
        *,
        window=None,
        context: ContextConfig = NATURAL,
        recompute=False,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """`[B, R, D]` to `[B, R, D]`; parameters as `gathered` returns them.

        Backward, the reduce-scatter out of the MLP and the all-gather into attention run beside the MLP's weight
        gradients, and the reduce-scatter out of attention beside attention's.
        """
        post = self.cfg.norm_placement == "post"
        with jax.named_scope("attention"):
            h = x_BRD if post else self._norm(x_BRD, "attn_norm")
            h, attn = together((h, self.attn))
            settings = {"window": window, "context": context, "recompute": recompute}
            h, cache = attn(h, rope, segment_ids_BT, **settings, cache=cache)
            h, mlp = together((h, self.mlp))
            h = checkpoint_name(scatter_sequence(h), "attn_out")
            x_BRD = x_BRD + (self._norm(h, "attn_norm") if post else h)
        with jax.named_scope("mlp"):
            h = checkpoint_name(mlp(x_BRD if post else self._norm(x_BRD, "mlp_norm")), "mlp_out")
            x_BRD = x_BRD + (self._norm(h, "mlp_norm") if post else h)
        return x_BRD, cache

    def _norm(self, x_BRD: jax.Array, name: str) -> jax.Array:
        weight = getattr(self, name)[...]
        return checkpoint_name(rms_norm(x_BRD, weight, "D", "BRD", self.cfg.norm_eps), name)


def _stack(cfg: ModelConfig, key: jax.Array, layer_order: tuple[int | None, ...]) -> Block:
    """The blocks in this order, each made where it rests; a layer's numbers depend on neither mesh nor order."""
    rows = np.array([0 if layer is None else layer for layer in layer_order])
    spec = stored("L", rows.shape)
    keys = jax.reshard(jax.random.split(key, cfg.num_layers)[rows], spec)
    blocks = jax.vmap(lambda k: Block(cfg, k))(keys)
    if None not in layer_order:
        return blocks
    real = jax.reshard(jnp.array([layer is not None for layer in layer_order]), spec)

    def clear(p):
        spread = jax.lax.broadcast_in_dim(real, p.shape, (0,), out_sharding=jax.typeof(p).sharding)
        return jnp.where(spread, p, 0)

    return jax.tree.map(clear, blocks)


class Transformer(nnx.Module):
    """Decoder-only language model, Llama-style; `models/hf.py` lists the families it covers exactly."""

    def __init__(
        self, cfg: ModelConfig, key: jax.Array, layer_order: Sequence[int | None] | None = None
    ):
        """`layer_order`: the layer at each position of the stack, None for one of zeros; default: as they follow."""
        self.cfg = cfg
        self.layer_order = tuple(range(cfg.num_layers) if layer_order is None else layer_order)
        k_embed, k_blocks, k_head = jax.random.split(key, 3)
        V, D = cfg.vocab_size, cfg.d_model
        self.embed = param(k_embed, "VD", "BT", (V, D))
        self.blocks = _stack(cfg, k_blocks, self.layer_order)
        self.final_norm = param(None, "D", "BRD", (D,), std=1)
        if not cfg.tied_embeddings:
            self.head = param(k_head, "DV", "BTD", (D, V))

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        remat: Callable[[Callable], Callable] = lambda layer: layer,
        context: ContextConfig = NATURAL,
        recompute: bool = False,
        cache: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array] | None]:
        """Hidden states `[B, R, D]` after the final norm, ready for `head_weight`.

        Args:
          tokens_BT: token ids, int32.
          positions_BT: position of each token in its document, int32.
          segment_ids_BT: document of each token, or None for one document a row.
          dtype: type of compute.
          remat: wraps the function of one layer, to say what the backward pass recomputes.
          context: how attention crosses cp; every sequence stands in its order (`parallel/order.py`), by default the
            natural one. With a cache it is not used.
          recompute: keep no attention scores for the backward pass.
          cache: keys and values `[L, B, S, K, H]` of earlier positions and their number, for generation.

        Returns:
          Hidden states, and the cache with these positions added.
        """
        in_order = self.layer_order == tuple(range(self.cfg.num_layers))
        assert in_order, (
            "the layers rest as a pipeline's stages want them: only a pipeline runs them"
        )
        inputs = (tokens_BT, positions_BT, segment_ids_BT)
        tokens_BT, positions_BT, segment_ids_BT = jax.tree.map(
            lambda x: reshard("BT->BT", x), inputs
        )
        with jax.named_scope("embedding"):
            x_BRD = self.embedding(tokens_BT, dtype)
        rope = rotary(positions_BT, self.cfg)
        stack, start = (self.blocks, None), jnp.int32(0)
        if cache is not None:
            stack, start = (self.blocks, cache[:2]), cache[2]
        outputs = []
        for window, layers in self._segments():

            def layer(x_BRD, block_and_cache, window=window):
                block, kv = block_and_cache
                x_BRD, kv = block.gathered(dtype)(
                    x_BRD,
                    rope,
                    segment_ids_BT,
                    window=window,
                    context=context,
                    recompute=recompute,
                    cache=None if kv is None else (*kv, start),
                )
                return x_BRD, None if kv is None else kv[:2]

            part = stack if layers is None else jax.tree.map(lambda p, i=layers: p[i], stack)
            with jax.named_scope("layers"):
                x_BRD, kv = jax.lax.scan(remat(layer), x_BRD, part)
            outputs.append(kv)
        x_BRD = self.normed(x_BRD)
        if cache is None:
            return x_BRD, None
        keys, values = (
            outputs[0]
            if len(outputs) == 1
            else jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
        )
        return x_BRD, (keys, values, start + tokens_BT.shape[1])

    def _segments(self) -> list[tuple[int | None, slice | None]]:
        """Runs of layers with the same attention window: one unless only the upper layers have a window."""
        windows = [self.cfg.window(i) for i in range(self.cfg.num_layers)]
        if len(set(windows)) == 1:
            return [(windows[0], None)]
        runs = [(window, len(list(group))) for window, group in itertools.groupby(windows)]
        stops = itertools.accumulate(length for _, length in runs)
        return [
            (window, slice(stop - length, stop))
            for (window, length), stop in zip(runs, stops, strict=True)
        ]

    def embedding(self, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The residual stream `[B, R, D]` of token ids; in a manual region a partial sum over pp."""
        embed = gather_param(self.embed[...], "VD", "BT", dtype, self.cfg.d_model)
        return look_up(embed, tokens_BT)

    def normed(self, x_BRD: jax.Array) -> jax.Array:
        """The final norm."""
        weight = gather_param(self.final_norm[...], "D", "BRD", jnp.float32, self.cfg.d_model)
        return rms_norm(x_BRD, weight, "D", "BRD", self.cfg.norm_eps)

    def head_weight(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The output head `[D, V]`, V over the tensor group and pp."""
        weight = self.embed[...].T if self.cfg.tied_embeddings else self.head[...]
        return gather_param(weight, "DV", "BTD", dtype, self.cfg.d_model)

    def loss(
        self,
        x_BRD: jax.Array,
        targets_BT: jax.Array,
        weight: jax.Array,
        *,
        z_loss: float = 0.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> tuple[jax.Array, jax.Array]:
        """Objective and bare loss of hidden states after the final norm, as `cross_entropy` defines them."""
        with jax.named_scope("loss"):
            x_BTD, head = gather_sequence(x_BRD, "V"), self.head_weight(dtype)
            return cross_entropy(x_BTD, head, targets_BT, weight, z_loss)

    def logits(
        self, tokens_BT, positions_BT, segment_ids_BT=None, *, dtype=jnp.float32
    ) -> jax.Array:
        """Logits `[B, T, V]` float32, whole: for tests and small models; training uses `loss`."""
        x_BRD, _ = self(tokens_BT, positions_BT, segment_ids_BT, dtype=dtype)
        x_BTD = gather_sequence(x_BRD, "V")
        return einsum("BTD,DV->BTV", x_BTD, self.head_weight(dtype), dtype=jnp.float32)
