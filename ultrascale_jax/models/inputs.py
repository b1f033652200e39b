"""Inputs of a layer besides the residual stream and its parameters: one record, handed from the model to attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import ContextConfig, ModelConfig, MoEConfig, require
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.models.fp8 import Fp8
from ultrascale_jax.models.rotary import query_factor, rotary
from ultrascale_jax.sharding.primitives import reshard
from ultrascale_jax.sharding.rules import mesh_size

NATURAL = ContextConfig(strategy="ring")
"""Context parallelism for sequences in natural order."""

DROPLESS = MoEConfig()
"""Experts as they come: nothing is added to the objective."""

PLAIN = Lowering.plain()

Cache = tuple[Any, ...]
"""Keys and values `[B, S, K, H]` of earlier positions, or what linear attention keeps of them; how many of these there
are (int32 scalar) comes last. A group of layers has one such tuple for each before that, and a model one for each
stack."""

STATIC = {"static": True}


def check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, where an embedding would clamp them silently."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    fix = f"is outside the model's vocabulary, 0 to {vocab_size - 1}; give ids of the model's own tokenizer"
    require(outside.size == 0, name, next(iter(outside.tolist()), None), fix)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """The same for every layer, but for `window`, `full`, `rotary`, `fp8` and `cache`.

    For a whole model the amaxes of `fp8`, `full` and `rotary` have a leading dim of layers, and `cache` one of rows,
    which `of_layer` takes away.
    """

    rope: tuple[jax.Array, jax.Array]
    """Cosine and sine of the rotary angles."""
    query_rope: tuple[jax.Array, jax.Array] | None = None
    """The same of queries, if they grow with their positions (`rope_scaling.query_beta`)."""
    local_rope: tuple[jax.Array, jax.Array] | None = None
    """The same for layers that are not `full`, if they have others; `of_layer` or `of_group` chooses."""
    full: jax.Array | None = None
    """Whether the layer ignores `window`, a bool scalar: so that layers of both kinds are one loop."""
    rotary: jax.Array | None = None
    """Whether the layer has rotary positions, a bool scalar, if some have none; `of_layer` takes them out of `rope`."""
    segment_ids_BT: jax.Array | None = None
    """Document of each token, or None for one document a row."""
    cache: Cache | None = None
    """Keys and values of earlier positions and their number, for generation."""
    length: jax.Array | None = None
    """With a cache, how many of the tokens are to be kept in it, an int32 scalar; the others are padding."""
    fp8: Fp8 | None = None
    """Recipe of the products that are computed in fp8."""
    dtype: jax.typing.DTypeLike = dataclasses.field(default=jnp.float32, metadata=STATIC)
    """Type of compute."""
    window: int | None = dataclasses.field(default=None, metadata=STATIC)
    """How many positions back attention reaches; `Transformer` sets it for each layer, alike in a pipeline."""
    context: ContextConfig = dataclasses.field(default=NATURAL, metadata=STATIC)
    """How attention crosses cp; every sequence stands in its order (`sharding/sequence_order.py`). Unused with a
    cache."""
    recompute: bool = dataclasses.field(default=False, metadata=STATIC)
    """Keep no attention scores for the backward pass."""
    recompute_each: bool = dataclasses.field(default=False, metadata=STATIC)
    """Recompute the layers of a group (`models/layer_group.py`) one by one in its backward pass."""
    moe: MoEConfig = dataclasses.field(default=DROPLESS, metadata=STATIC)
    """How tokens are sent to their experts, and how the experts are balanced."""
    lowering: Lowering = dataclasses.field(default=PLAIN, metadata=STATIC)
    """How XLA runs the layers."""

    @classmethod
    def of(
        cls,
        cfg: ModelConfig,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        *,
        context: ContextConfig | None = None,
        **settings: Any,
    ) -> "LayerInputs":
        """Make the inputs of tokens at these positions of their documents (int32); `settings` are the other fields.

        Raises `UserError` without a `context` where cp splits the sequence.
        """
        cp = mesh_size("cp")
        fix = (
            f"cp={cp} splits the sequence; give cfg.cp for rows as a loader has them, or "
            "ContextConfig(strategy='ring') for rows in natural order"
        )
        require(context is not None or cp == 1, "context", context, fix)
        if segment_ids_BT is not None:
            segment_ids_BT = reshard("BT->BT", segment_ids_BT)
        positions_BT = reshard("BT->BT", positions_BT)
        if cfg.rope_theta_local or cfg.full_attention is not None:
            local = cfg.rope_theta_local > 0
            settings["local_rope"] = rotary(positions_BT, cfg, local=local)
        if cfg.full_attention_every and cfg.layer_group == 1:
            settings["full"] = jnp.array([cfg.is_full(layer) for layer in range(cfg.num_layers)])
        if cfg.nope_every > 1:
            settings["rotary"] = jnp.array(
                [cfg.is_rotary(layer) for layer in range(cfg.num_layers)]
            )
        rope = rotary(positions_BT, cfg.full_shape)
        if cfg.nope_every == 1:
            rope = jnp.ones_like(rope[0]), jnp.zeros_like(rope[1])
        if cfg.rope_scaling is not None and cfg.rope_scaling.query_beta:
            factor_BT1 = query_factor(positions_BT, cfg.rope_scaling)[:, :, None]
            settings["query_rope"] = tuple(factor_BT1 * part for part in rope)
        context = NATURAL if context is None else context
        return cls(rope=rope, segment_ids_BT=segment_ids_BT, context=context, **settings)

    @property
    def stacked(self) -> tuple:
        """Keys and values, amaxes and flags, which differ between layers and have a leading dim of these."""
        return self.cache and self.cache[:-1], self.fp8 and self.fp8.amaxes, self.full, self.rotary

    def of_stack(self, i: int) -> "LayerInputs":
        """Return the inputs with the i-th part of the cache: of a stack of a model, or of a layer of a group."""
        cache = None if self.cache is None else (*self.cache[i], self.cache[-1])
        return dataclasses.replace(self, cache=cache)

    def of_group(self, cfg: ModelConfig, i: int) -> "LayerInputs":
        """Return the inputs of the i-th layer of a group (`models/layer_group.py`): its cache, window and positions."""
        cached = self.of_stack(i)
        if cfg.is_full(i):
            return dataclasses.replace(cached, window=None, local_rope=None)
        return dataclasses.replace(cached, rope=self.local_rope or self.rope, local_rope=None)

    def of_layer(self, row: tuple) -> "LayerInputs":
        """Return the inputs of one layer; `row` is that layer's part of `stacked`."""
        kv, amaxes, full, rotary = row
        cache = None if self.cache is None else (*kv, self.cache[-1])
        fp8 = None if self.fp8 is None else dataclasses.replace(self.fp8, amaxes=amaxes)
        rope, local_rope = self.rope, self.local_rope
        if local_rope is not None and full is not None:
            pairs = zip(rope, local_rope, strict=True)
            rope, local_rope = tuple(jnp.where(full, whole, local) for whole, local in pairs), None
        if rotary is not None:
            cos, sin = rope
            rope = jnp.where(rotary, cos, 1), jnp.where(rotary, sin, 0)
        return dataclasses.replace(
            self, cache=cache, fp8=fp8, full=full, rope=rope, local_rope=local_rope, rotary=None
        )
