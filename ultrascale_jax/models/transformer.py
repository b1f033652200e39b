"""The decoder: embedding, a scan over stacked blocks, final norm, head.

Modules are plain pytrees. A block is made once under `jax.vmap` over its init keys, so each of its parameters has a
leading L, and `jax.lax.scan` runs it: compile time does not grow with depth. Under ZeRO-3 each iteration gathers one
layer's parameters (`Block.gather_params`): in training those of the next layer, otherwise its own.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ultrascale_jax.config import Config, KernelsConfig, ModelConfig
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.config.model import FeedForward
from ultrascale_jax.kernels.device import takes
from ultrascale_jax.models.block import FEED_FORWARDS, Block, BlockStack, Layers, cut, normed
from ultrascale_jax.models.fp8 import Fp8
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import (
    gather_params,
    gather_sequence,
    map_params,
    param,
    zero_sizes,
)
from ultrascale_jax.models.loss import cross_entropy, cross_entropy_of_pieces
from ultrascale_jax.models.moe import Routed
from ultrascale_jax.models.mtp import MTPModule
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder, stack_order
from ultrascale_jax.parallel.prefetch import Layer, prefetch_scan
from ultrascale_jax.sharding.primitives import (
    einsum,
    embed_lookup,
    gather_param,
    leave_sums,
    reshard,
)
from ultrascale_jax.sharding.rules import stored_spec


def _stack(make: Callable, cfg: ModelConfig, key: jax.Array, order: LayerOrder, first: int):
    """Stack `make(key)` of layers `first + i`, each made where it is stored, the same on any mesh and in any order."""
    layers = np.array([0 if layer is None else first + layer for layer in order])
    spec = stored_spec("L", layers.shape)
    keys = jax.reshard(jax.random.split(key, cfg.num_layers)[layers], spec)
    stack = jax.vmap(make)(keys)
    if None not in order:
        return stack
    real = jax.reshard(jnp.array([layer is not None for layer in order]), spec)

    def clear(p):
        spread = jax.lax.broadcast_in_dim(real, p.shape, (0,), out_sharding=jax.typeof(p).sharding)
        return jnp.where(spread, p, 0)

    return jax.tree.map(clear, stack)


def _joined[Tree](stacks: Sequence[Tree]) -> Tree:
    """Join stacks of consecutive layers."""
    if len(stacks) == 1:
        return stacks[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)


class LayerRun(NamedTuple):
    """Consecutive layers that are alike: one scan runs them."""

    layers: range
    window: int | None
    feed_forward: FeedForward
    fp8: Fp8 | None


class ModelOutputs(NamedTuple):
    """Results of the layers."""

    x_BRD: jax.Array
    """Hidden states `[B, R, D]` after the final norm, ready for `head_weight`."""
    balance: jax.Array
    """Term of the objective for the balance of experts: a float32 sum over tokens."""
    statistics_LZ: jax.Array | None
    """`Routed.statistics_Z` of each layer of experts, if there are any."""
    cache: Cache | None
    """With a cache, the same with these positions added."""


class Transformer(nnx.Module):
    """Decoder-only language model, Llama-style; `huggingface/families.py` lists the families it covers exactly.

    A subclass may name classes of its own for the parts of its layers, override methods (`loss`, `unembed`) and add
    parameters; `docs/layers.md` shows how. `train`, `init_state` and the like take it as `model=`.
    """

    layers: ClassVar[Layers] = Layers()
    """Classes of the parts of each layer."""

    @staticmethod
    def make_optimizer(cfg: Config) -> optax.GradientTransformation | None:
        """Return the optimizer of the trained parameters; None: the one of `cfg.optim`.

        It gets clipped gradients, parameters and state as models of this class, float32 and sharded. Its state has
        arrays in the shapes of the parameters, and scalars. `lr_schedule(cfg)` is the run's learning rate.
        """
        return None

    @staticmethod
    def is_trained(path: str) -> bool:
        """Return whether the parameter at a dotted path, as `blocks.attn.w_q`, is trained; others stay as they are."""
        return True

    def __init__(
        self,
        cfg: ModelConfig,
        key: jax.Array,
        layer_order: Sequence[int | None] | None = None,
        ranks: int = 1,
        *,
        kernels: KernelsConfig = AUTO,
    ):
        """`layer_order`: a pipeline's (`schedules.LayerOrder`), over `ranks`; without it layers rest in their order."""
        self.cfg, self.kernels = cfg, kernels
        self.staged, self.ranks = layer_order is not None, ranks
        self.layer_order = tuple(range(cfg.num_layers) if layer_order is None else layer_order)
        k_embed, k_blocks, k_head = jax.random.split(key, 3)
        V, D = cfg.vocab_size, cfg.d_model
        self.embed = param(k_embed, "VD", "BT", (V, D))
        attention = functools.partial(Block.init_attention, self.layers, cfg, kernels)
        parts = _stack(attention, cfg, k_blocks, self.layer_order, 0).parts
        for kind in FEED_FORWARDS:
            if layers := self.layers_with(kind):
                make = functools.partial(Block.init_feed_forward, kind, self.layers, cfg, kernels)
                order = self.layer_order_of(f"blocks.{kind}.")
                parts[kind] = _stack(make, cfg, k_blocks, order, layers.start)
        self.blocks = BlockStack(cfg, kernels, **parts)
        self.final_norm = self.layers.make_norm(cfg)
        if not cfg.tied_embeddings:
            self.head = param(k_head, "DV", "BTD", (D, V))
        if cfg.mtp_layers:
            keys = (jax.random.fold_in(key, 2 + depth) for depth in range(cfg.mtp_layers))
            self.mtp = nnx.List([MTPModule(self.layers, cfg, k_mtp, kernels) for k_mtp in keys])

    def with_blocks(self, blocks: BlockStack | None) -> "Transformer":
        """Return the model with these blocks; without any it is the embedding, the final norm and the head."""
        model = copy.copy(self)
        model.blocks = blocks  # pyrefly: ignore[bad-assignment]
        return model

    def without_mtp(self) -> "Transformer":
        """Return the model without the modules of `model.mtp_layers`, which only training runs."""
        if not self.cfg.mtp_layers:
            return self
        model = copy.copy(self)
        model.cfg = dataclasses.replace(self.cfg, mtp_layers=0)
        del model.mtp
        return model

    def with_whole_head(self, dtype: jax.typing.DTypeLike) -> "Transformer":
        """Return the model with its output head gathered, for several losses to share."""
        model, name = copy.copy(self), "embed" if self.cfg.tied_embeddings else "head"
        setattr(model, name, self.gathered(getattr(self, name), dtype))
        return model

    def layers_with(self, part: str) -> range:
        """Return the layers that have this part of the blocks."""
        dense, layers = self.cfg.dense_layers, self.cfg.num_layers
        return range(dense if part == "moe" else 0, dense if part == "mlp" else layers)

    def layer_order_of(self, path: str) -> LayerOrder:
        """Return the layer at each row of the stack at a dotted path, as `blocks.moe.w_up`; None is padding.

        Layers are numbered among those that have that part. Each rank of a pipeline has as many rows as the rank with
        most of these layers.
        """
        part = path.rpartition("blocks.")[2].partition(".")[0]
        layers = self.layers_with(part)
        if not self.staged:
            return tuple(range(len(layers)))
        if len(layers) == self.cfg.num_layers:
            return self.layer_order
        return stack_order(self.layer_order, self.ranks, layers)

    def __call__(
        self,
        tokens_BT: jax.Array,
        inputs: LayerInputs,
        *,
        remat: Callable[[Callable], Callable] = lambda layer: layer,
        offload: Sequence[str] = (),
    ) -> ModelOutputs:
        """Run the model on token ids (int32).

        `remat` wraps a layer's function, to say what its backward pass recomputes. Where `inputs.lowering` gathers
        ahead, what `remat` keeps by the names in `offload` waits in the host's memory; not with a cache.
        """
        assert not self.staged, (
            "the layers rest as a pipeline's stages want them: only a pipeline runs them"
        )
        with jax.named_scope("embedding"):
            x_BRD = self.embedding(reshard("BT->BT", tokens_BT), inputs.dtype)
        found = []
        for run in self._runs(inputs.fp8):
            alike = dataclasses.replace(inputs, window=run.window, fp8=run.fp8)
            kind, start, count = run.feed_forward, run.layers.start, len(run.layers)
            first_of_kind = start - self.layers_with(kind).start
            block = self.blocks.layers(kind, count, start, first_of_kind)
            part = block, cut(alike.stacked, start, start + count)
            scan = self._scanned
            if inputs.lowering.gathers_ahead and count > 1:
                scan = functools.partial(self._prefetched, offload=offload)
            with jax.named_scope("layers"):
                x_BRD, out = scan(x_BRD, part, alike, remat)
            found.append(out)
        caches, routers = zip(*found, strict=True)
        routers = [router for router in routers if router is not None]
        balance = sum((jnp.sum(router.balance_BR) for router in routers), jnp.float32(0.0))
        statistics_LZ = _joined([router.statistics_Z for router in routers]) if routers else None
        cache = None
        if inputs.cache is not None:
            cache = (*_joined(caches), inputs.cache[2] + tokens_BT.shape[1])
        return ModelOutputs(self.normed(x_BRD), balance, statistics_LZ, cache)

    def _scanned(self, x_BRD: jax.Array, part: tuple, inputs: LayerInputs, remat: Callable):
        """Run layers that are alike, each of which gathers its own parameters.

        `part` are their parameters and their parts of `inputs.stacked`. Returns the residual stream, and keys with
        values and `Routed` of each layer.
        """

        def layer(x_BRD, part):
            block, own = part
            own = inputs.of_layer(own)
            x_BRD, routed, cache = block.gather_params(own)(x_BRD, own)
            return x_BRD, (cache and cache[:2], routed)

        return jax.lax.scan(remat(layer), x_BRD, part)

    def _prefetched(
        self,
        x_BRD: jax.Array,
        part: tuple,
        inputs: LayerInputs,
        remat: Callable,
        offload: Sequence[str],
    ):
        """Run layers that are alike, the parameters of the next one gathered while this one computes."""
        block, own = part

        def run(block, x_BRD, inputs, own):
            x_BRD, routed, _ = block(x_BRD, inputs.of_layer(own))
            if routed is None:
                return x_BRD, jnp.float32(0.0)
            return x_BRD, routed.balance_BR, routed.statistics_Z

        def gather(block, own):
            return block.gather_params(inputs.of_layer(own))

        sums = functools.partial(map_params, leave_sums) if inputs.lowering.sums_late else None
        layer = Layer(gather, remat(run), sums)
        # The layers read no fp8 from their inputs: `gather_params` has made of it what their parameters are.
        around = dataclasses.replace(inputs, fp8=None)
        x_BRD, (balance_LBR, *statistics) = prefetch_scan(
            layer, block, own, x_BRD, around, lowering=inputs.lowering, offload=offload
        )
        return x_BRD, (None, Routed(balance_LBR, *statistics) if statistics else None)

    def _runs(self, fp8: Fp8 | None) -> list[LayerRun]:
        """Group the layers into runs that are alike."""
        cfg, runs = self.cfg, []

        def traits(layer: int) -> tuple:
            in_fp8 = fp8 is not None and fp8.recipe.covers(layer, cfg.num_layers)
            return cfg.loop_window(layer), cfg.feed_forward(layer), in_fp8

        for (window, kind, in_fp8), group in itertools.groupby(range(cfg.num_layers), traits):
            first, *rest = group
            layers = range(first, first + 1 + len(rest))
            runs.append(LayerRun(layers, window, kind, fp8 if in_fp8 else None))
        return runs

    def embedding(self, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Look up the residual stream `[B, R, D]` of token ids; in a manual region a partial sum over pp."""
        x_BRD = embed_lookup(self.embed[...], tokens_BT, dtype, zero_sizes(self.cfg))
        return x_BRD * jnp.asarray(self.cfg.d_model**0.5, dtype) if self.cfg.embed_scale else x_BRD

    def normed(self, x_BRD: jax.Array) -> jax.Array:
        """Apply the final norm."""
        norm = self.gathered(self.final_norm, x_BRD.dtype)
        return normed(x_BRD, norm, self.cfg, self.kernels)

    def gathered[M](self, module: M, dtype: jax.typing.DTypeLike) -> M:
        """Return a parameter or a module beside the blocks with full parameters, matrices in `dtype`."""
        return gather_params(module, dtype, zero_sizes(self.cfg))

    def head_weight(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the output head `[D, V]`, V over the tensor group and pp."""
        weight = self.embed[...].T if self.cfg.tied_embeddings else self.head[...]
        return gather_param(weight, "DV", "BTD", dtype, zero_sizes(self.cfg))

    def loss(
        self,
        x_BRD: jax.Array,
        targets_BT: jax.Array,
        weight: jax.Array,
        *,
        z_loss: float = 0.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> tuple[jax.Array, jax.Array]:
        """Return objective and bare loss of hidden states after the final norm, as `cross_entropy` defines them.

        In training and evaluation; `generate` reads `unembed`, and scores of single rows `head_weight`.
        """
        with jax.named_scope("loss"):
            x_BTD, head = gather_sequence(x_BRD, "V"), self.head_weight(dtype)
            if takes("loss", self.kernels.loss, "mosaic"):
                return cross_entropy_of_pieces(x_BTD, head, targets_BT, weight, z_loss)
            return cross_entropy(x_BTD, head, targets_BT, weight, z_loss)

    def logits(
        self, tokens_BT, positions_BT, segment_ids_BT=None, *, dtype=jnp.float32
    ) -> jax.Array:
        """Return logits `[B, T, V]` float32, unsharded: for tests and small models; training uses `loss`."""
        inputs = LayerInputs.of(self.cfg, positions_BT, segment_ids_BT, dtype=dtype)
        x_BTD = gather_sequence(self(tokens_BT, inputs).x_BRD, "V")
        return self.unembed(x_BTD, self.head_weight(dtype))

    def unembed(self, x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
        """Return logits `[B, T, V]` float32 of hidden states after the final norm: of `logits` and `generate`."""
        return einsum("BTD,DV->BTV", x_BTD, head_DV, dtype=jnp.float32)
