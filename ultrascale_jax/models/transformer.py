"""The decoder: embedding, a scan over stacked blocks, final norm, head.

Modules are plain pytrees. A block is made once under `jax.vmap` over its init keys, so each of its parameters has a
leading L, and `jax.lax.scan` runs it: compile time does not grow with depth. Under ZeRO-3 a block gathers its own
parameters as the first thing it does, inside the scan, so that XLA moves one layer at a time.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import ModelConfig
from ultrascale_jax.models.attention import Attention, Cache
from ultrascale_jax.models.layers import (
    MLP,
    cast,
    gather,
    gather_param,
    gather_sequence,
    gradient_axes,
    param,
    rms_norm,
    rotary,
    together,
)
from ultrascale_jax.sharding import act, einsum, gathered


class Block(nnx.Module):
    """Attention and MLP, each with its norm and residual connection."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        self.cfg = cfg
        k_attn, k_mlp = jax.random.split(key)
        self.attn_norm = param(None, "D", "BRD", (cfg.d_model,), std=1)
        self.attn = Attention(cfg, k_attn)
        self.mlp_norm = param(None, "D", "BRD", (cfg.d_model,), std=1)
        self.mlp = MLP(cfg, k_mlp)

    def __call__(
        self,
        x_BRD: jax.Array,
        rope,
        segment_ids_BT=None,
        *,
        window=None,
        recompute=False,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """`[B, R, D]` to `[B, R, D]`; parameters as `gather` returns them.

        Backward, the reduce-scatter out of the MLP and the all-gather into attention run beside the MLP's weight
        gradients, and the reduce-scatter out of attention beside attention's.
        """
        post = self.cfg.norm_placement == "post"
        with jax.named_scope("attention"):
            h = x_BRD if post else self._norm(x_BRD, "attn_norm")
            h, attn = together((h, self.attn))
            h, cache = attn(
                h, rope, segment_ids_BT, window=window, recompute=recompute, cache=cache
            )
            h, mlp = together((h, self.mlp))
            h = checkpoint_name(jax.reshard(h, act("BRD")), "attn_out")
            x_BRD = x_BRD + (self._norm(h, "attn_norm") if post else h)
        with jax.named_scope("mlp"):
            h = checkpoint_name(mlp(x_BRD if post else self._norm(x_BRD, "mlp_norm")), "mlp_out")
            x_BRD = x_BRD + (self._norm(h, "mlp_norm") if post else h)
        return x_BRD, cache

    def _norm(self, x_BRD: jax.Array, name: str) -> jax.Array:
        weight = getattr(self, name)[...]
        return checkpoint_name(rms_norm(x_BRD, weight, "D", "BRD", self.cfg.norm_eps), name)


class Transformer(nnx.Module):
    """Decoder-only language model, Llama-style; `models/hf.py` lists the families it covers exactly."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        self.cfg = cfg
        k_embed, k_blocks, k_head = jax.random.split(key, 3)
        V, D = cfg.vocab_size, cfg.d_model
        self.embed = param(k_embed, "VD", "BT", (V, D))
        self.blocks = jax.vmap(lambda k: Block(cfg, k))(jax.random.split(k_blocks, cfg.num_layers))
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
          recompute: keep no attention scores for the backward pass.
          cache: keys and values `[L, B, S, K, H]` of earlier positions and their number, for generation.

        Returns:
          Hidden states, and the cache with these positions added.
        """
        inputs = (tokens_BT, positions_BT, segment_ids_BT)
        tokens_BT, positions_BT, segment_ids_BT = jax.tree.map(
            lambda x: jax.reshard(x, act("BT")), inputs
        )
        with jax.named_scope("embedding"):
            x_BRD = self._embed(tokens_BT, dtype)
        rope = rotary(positions_BT, self.cfg)
        stack, start = (self.blocks, None), jnp.int32(0)
        if cache is not None:
            stack, start = (self.blocks, cache[:2]), cache[2]
        outputs = []
        for window, layers in self._segments():

            def layer(x_BRD, block_and_cache, window=window):
                block, kv = block_and_cache
                x_BRD, kv = gather(block, dtype)(
                    x_BRD,
                    rope,
                    segment_ids_BT,
                    window=window,
                    recompute=recompute,
                    cache=None if kv is None else (*kv, start),
                )
                return x_BRD, None if kv is None else kv[:2]

            part = stack if layers is None else jax.tree.map(lambda p, i=layers: p[i], stack)
            with jax.named_scope("layers"):
                x_BRD, kv = jax.lax.scan(remat(layer), x_BRD, part)
            outputs.append(kv)
        final_norm = gather_param(self.final_norm[...], "D", "BRD", dtype)
        x_BRD = rms_norm(x_BRD, final_norm, "D", "BRD", self.cfg.norm_eps)
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
        windows = [
            self.cfg.sliding_window if i >= self.cfg.first_window_layer else None
            for i in range(self.cfg.num_layers)
        ]
        if len(set(windows)) == 1:
            return [(windows[0], None)]
        runs = [(window, len(list(group))) for window, group in itertools.groupby(windows)]
        stops = itertools.accumulate(length for _, length in runs)
        return [
            (window, slice(stop - length, stop))
            for (window, length), stop in zip(runs, stops, strict=True)
        ]

    def _embed(self, tokens_BT: jax.Array, dtype) -> jax.Array:
        """Rows of the table, whose D is split over the tensor group for the look-up.

        Then D travels back: an all-to-all over sp, which splits the sequence, and an all-gather over tp.
        """
        (batch,), (sequence,), (rest,) = (act(dim).partitions for dim in "BTR")
        # Two moves, not one: XLA gives a wrong gradient for a reshard that gathers over one axis and moves another.
        table = gather_param(self.embed[...], "VD", "BT", dtype)
        table = jax.reshard(table, P(None, ("tp", "sp"), reduced=gradient_axes("VD", "BT")))
        x_BTD = table.at[tokens_BT].get(out_sharding=P(batch, sequence, ("tp", "sp")), mode="clip")
        x_BRD = jax.reshard(x_BTD, P(batch, rest, "tp"))
        return jax.reshard(x_BRD, act("BRD"))

    def head_weight(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The output head `[D, V]`, V over the tensor group."""
        tied = self.cfg.tied_embeddings
        weight = cast(self.embed[...].T if tied else self.head[...], "DV", dtype)
        return jax.reshard(weight, gathered("DV", weight.shape, reduced=gradient_axes("DV", "BTD")))

    def logits(
        self, tokens_BT, positions_BT, segment_ids_BT=None, *, dtype=jnp.float32
    ) -> jax.Array:
        """Logits `[B, T, V]` float32, whole: for tests and small models; training uses `models/loss.py`."""
        x_BRD, _ = self(tokens_BT, positions_BT, segment_ids_BT, dtype=dtype)
        x_BTD = gather_sequence(x_BRD)
        return einsum("BTD,DV->BTV", x_BTD, self.head_weight(dtype), dtype=jnp.float32)
