"""The decoder: embedding, a scan over each stack of equal layers, final norm, head.

    config.stacks                        model.stacks                     model.orders
    (range(0, 3), range(3, 61))          (a Block [3, ...] with an MLP,   ((0, 1, 2), (3, 4, ..., 60))
                                          a Block [58, ...] with experts)

Layers are equal if their parameters are. A stack is a `Block` made under `jax.vmap` over the init keys of its layers,
so each parameter has a leading L, and `jax.lax.scan` runs it: compile time does not grow with depth. Where layers
differ in window, precision or recomputation, a stack is run in segments; a period of windows (every sixth layer full)
is one segment, whose layers read a flag. Under ZeRO-3 each iteration gathers one layer's parameters
(`Block.gather_params`): in training the next layer's, otherwise its own.

`model.orders` says where layers are stored: the layer at each row of each stack. A pipeline's have padding
(`schedules.stack_orders`); a checkpoint's are those above (`checkpoint/mesh_independent.py`).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ultrascale_jax.config import Config, KernelsConfig, ModelConfig, require, require_type
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.kernels.device import takes
from ultrascale_jax.models.block import Layers, Terms, normed
from ultrascale_jax.models.inputs import NATURAL, Cache, LayerInputs
from ultrascale_jax.models.layer_group import Row, by_layer, make_row
from ultrascale_jax.models.layers import (
    gather_params,
    gather_sequence,
    param,
    zero_sizes,
)
from ultrascale_jax.models.loss import capped, cross_entropy, cross_entropy_of_shards
from ultrascale_jax.models.mtp import MTPModule
from ultrascale_jax.models.stack import LayerOutputs, Recomputation, keep_all, run, segments
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.sharding.primitives import (
    einsum,
    embed_lookup,
    gather_param,
    reshard,
)
from ultrascale_jax.sharding.rules import act, mesh_size, place, stored_spec


def stacked(make: Callable, cfg: ModelConfig, key: jax.Array, order: LayerOrder) -> Any:
    """Stack `make(key)` of the layers in `order`, each made where it is stored, the same on any mesh, in any order."""
    layers = np.array([layer or 0 for layer in order])
    spec = stored_spec("L", layers.shape)
    keys = place(jax.random.split(key, cfg.num_layers)[layers], spec)
    stack = jax.vmap(make)(keys)
    if None not in order:
        return stack
    real = place(jnp.array([layer is not None for layer in order]), spec)

    def clear(p):
        spread = jax.lax.broadcast_in_dim(real, p.shape, (0,), out_sharding=jax.typeof(p).sharding)
        return jnp.where(spread, p, 0)

    return jax.tree.map(clear, stack)


def _joined[Tree](parts: Sequence[Tree]) -> Tree:
    """Join what consecutive layers returned."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def _mean_over_layers(outputs: Sequence[LayerOutputs]) -> Terms:
    """Return each term's mean over the layers that returned it."""
    names = dict.fromkeys(name for output in outputs for name in output.terms)
    rows = {
        name: [output.terms[name] for output in outputs if name in output.terms] for name in names
    }
    return {name: jnp.mean(_joined(rows_L)) for name, rows_L in rows.items()}


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
    captured: dict[int, jax.Array]
    """Residual stream `[B, R, D]` after the layers that `capture` names."""
    terms: Terms
    """Terms that the parts of the layers returned, each the mean over the layers."""


class Transformer(nnx.Module):
    """Decoder-only language model, Llama-style; `huggingface/families.py` lists the families it covers exactly.

    A subclass may name classes of its own for the parts of its layers, override methods (`loss`, `unembed`) and add
    parameters; `docs/layers.md` shows how. `train`, `init_state` and the like take it as `model=`.
    """

    layers: ClassVar[Layers] = Layers()
    """Classes of the parts of each layer."""

    loss_terms: ClassVar[tuple[str, ...]] = ()
    """Names of the scalars that `loss` returns in a dict, its third result. Each is a sum over positions times
    `weight`, as the bare loss is; a step's metrics have its mean over the targets, beside `loss`."""

    layer_terms: ClassVar[Mapping[str, float]] = {}
    """Names of the terms that the parts of `layers` return, and the weight of each in the objective; 0 only reports
    it. A step's metrics have the mean over positions and over the layers that return it."""

    @staticmethod
    def make_optimizer(cfg: Config) -> optax.GradientTransformation | None:
        """Return the optimizer of the trained parameters; None: the one of `cfg.optim`.

        It gets clipped gradients, parameters and state as models of this class, float32 and sharded. Its state has
        arrays in the shapes of the parameters, and scalars. `lr_schedule(cfg)` is the run's learning rate.
        """
        return None

    @staticmethod
    def is_trained(path: str) -> bool:
        """Return whether the parameter at a dotted path (`stacks.0.attn.w_q`) is trained; others stay as they are."""
        return True

    def __init__(
        self,
        cfg: ModelConfig,
        key: jax.Array,
        orders: Sequence[LayerOrder] | None = None,
        *,
        kernels: KernelsConfig = AUTO,
    ):
        """`orders`: of a pipeline's stacks (`schedules.stack_orders`); without it layers are in their order."""
        self.cfg, self.kernels, self.staged = cfg, kernels, orders is not None
        self.orders = tuple(tuple(layers) for layers in cfg.stacks) if orders is None else orders
        k_embed, k_stacks, k_head = jax.random.split(key, 3)
        V, D = cfg.vocab_size, cfg.d_model
        self.embed = param(k_embed, "VD", "BT", (V, D))
        self.stacks = nnx.List()
        for layers, order in zip(cfg.stacks, self.orders, strict=True):
            row = range(layers.start, layers.start + layers.step)
            make = functools.partial(make_row, self.layers, cfg, row, kernels)
            self.stacks.append(stacked(make, cfg, k_stacks, order))
        self.final_norm = self.layers.make_norm(cfg)
        if not cfg.tied_embeddings:
            self.head = param(k_head, "DV", "BTD", (D, V))
        if cfg.mtp_layers:
            keys = (jax.random.fold_in(key, 2 + depth) for depth in range(cfg.mtp_layers))
            self.mtp = nnx.List([MTPModule(self.layers, cfg, k_mtp, kernels) for k_mtp in keys])

    def with_stacks(self, stacks: Sequence[Row]) -> "Transformer":
        """Return the model with these stacks; without any it is the embedding, the final norm and the head."""
        model = copy.copy(self)
        model.stacks = nnx.List(stacks)
        return model

    def without_mtp(self) -> "Transformer":
        """Return the model without the modules of `model.mtp_layers`, which only training runs."""
        if not self.cfg.mtp_layers:
            return self
        model = copy.copy(self)
        model.cfg = dataclasses.replace(self.cfg, mtp_layers=0)
        del model.mtp
        return model

    def with_mtp_of(self, other: "Transformer") -> "Transformer":
        """Return the model with the modules of another of its shape; the inverse of `without_mtp`."""
        model = copy.copy(self)
        model.cfg = dataclasses.replace(self.cfg, mtp_layers=other.cfg.mtp_layers)
        model.mtp = other.mtp
        return model

    def with_whole_head(self, dtype: jax.typing.DTypeLike) -> "Transformer":
        """Return the model with its output head gathered, for several losses to share."""
        model, name = copy.copy(self), "embed" if self.cfg.tied_embeddings else "head"
        setattr(model, name, self.gathered(getattr(self, name), dtype))
        return model

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The number of each layer's stack, and its row there."""
        stacks = enumerate(zip(self.orders, self.cfg.stacks, strict=True))
        places = {
            first + depth: (i, row)
            for i, (order, layers) in stacks
            for row, first in enumerate(order)
            if first is not None
            for depth in range(layers.step)
        }
        return [places[layer] for layer in range(self.cfg.num_layers)]

    def __call__(
        self,
        tokens_BT: jax.Array,
        inputs: LayerInputs,
        *,
        remat: Callable[[int], Recomputation] = keep_all,
        capture: Collection[int] = (),
    ) -> ModelOutputs:
        """Run the model on token ids (int32), and keep the residual stream after the layers in `capture`, from 0.

        `remat` says what the backward pass of the layer with a number recomputes.
        """
        self._check_call(inputs, capture)
        with jax.named_scope("embedding"):
            x_BRD = self.embedding(reshard("BT->BT", tokens_BT), inputs.dtype)
        outputs: list[LayerOutputs] = []
        captured: dict[int, jax.Array] = {}
        caches: list[Any] = []
        for i, (stack, layers) in enumerate(zip(self.stacks, self.cfg.stacks, strict=True)):
            first = len(outputs)
            for segment in segments(stack, layers, inputs.of_stack(i), remat, capture):
                with jax.named_scope("layers"):
                    x_BRD, output = run(segment, x_BRD)
                outputs.append(output)
                if segment.last_layer in capture:
                    captured[segment.last_layer] = x_BRD
            caches.append(_joined([output.kv for output in outputs[first:]]))
        routers = [output.routed for output in outputs if output.routed is not None]
        balance = sum((jnp.sum(router.balance_BR) for router in routers), jnp.float32(0.0))
        statistics_LZ = (
            _joined([by_layer(router.statistics_Z) for router in routers]) if routers else None
        )
        cache = None
        if inputs.cache is not None:
            cache = *caches, inputs.cache[-1] + tokens_BT.shape[1]
        terms = _mean_over_layers(outputs)
        self.check_layer_terms(terms)
        return ModelOutputs(self.normed(x_BRD), balance, statistics_LZ, cache, captured, terms)

    def _check_call(self, inputs: LayerInputs, capture: Collection[int]) -> None:
        """Refuse arguments of `__call__` of another type, layers to capture that end no row, and a pipeline's model."""
        fix = "as LayerInputs.of(cfg.model, positions, segment_ids)"
        require_type("inputs", inputs, LayerInputs, fix)
        fix = "the layers are in the order of a pipeline's stages; gather_stages(model) has all of them on each rank"
        require(not self.staged, "mesh.pp", mesh_size("pp"), fix)
        require_type("capture", capture, Collection, "as (2,) for the layer with number 2")
        ends = {start - 1 for start in self.cfg.row_starts[1:]} | {self.cfg.num_layers - 1}
        unknown = sorted(set(capture) - ends)
        last = ", the last ones of the stacks' rows" if self.cfg.layer_group > 1 else ""
        fix = f"must be layers from 0 to {self.cfg.num_layers - 1}{last}"
        require(not unknown, "capture", unknown, fix)

    def check_layer_terms(self, terms: Collection[str]) -> None:
        """Refuse other names of terms, which the parts of the layers returned, than `layer_terms`."""
        fix = f"the parts returned {sorted(terms)}; the attribute names each, with its weight, and no other"
        same = sorted(terms) == sorted(self.layer_terms)
        require(same, f"{type(self).__name__}.layer_terms", self.layer_terms, fix)

    def embedding(self, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Look up the residual stream `[B, R, D]` of token ids; in a manual region a partial sum over pp."""
        x_BRD = embed_lookup(self.embed[...], tokens_BT, dtype, zero_sizes(self.cfg))
        scale = self.cfg.embed_scale or self.cfg.d_model**0.5
        return x_BRD if scale == 1 else x_BRD * jnp.asarray(scale, dtype)

    def normed(self, x_BRD: jax.Array) -> jax.Array:
        """Apply the final norm."""
        norm = self.gathered(self.final_norm, x_BRD.dtype)
        return normed(x_BRD, norm, self.cfg, self.kernels)

    def gathered[M](self, module: M, dtype: jax.typing.DTypeLike) -> M:
        """Return a parameter or a module beside the blocks with full parameters, matrices in `dtype`."""
        return gather_params(module, dtype, zero_sizes(self.cfg))

    def head_weight(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the output head `[D, V]`, V over the tensor group and pp, which gives divided logits."""
        weight = self.embed[...].T if self.cfg.tied_embeddings else self.head[...]
        if self.cfg.logit_divisor != 1:
            weight = weight / self.cfg.logit_divisor
        return gather_param(weight, "DV", "BTD", dtype, zero_sizes(self.cfg))

    def loss(
        self,
        x_BRD: jax.Array,
        targets_BT: jax.Array,
        weight: jax.Array,
        *,
        z_loss: float = 0.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return objective and bare loss of hidden states after the final norm, as `cross_entropy` defines them.

        A subclass with `loss_terms` returns a dict of them too. In training and evaluation; `generate` reads `unembed`,
        and scores of single rows `head_weight`.
        """
        with jax.named_scope("loss"):
            x_BTD, head = gather_sequence(x_BRD, "V"), self.head_weight(dtype)
            arguments = x_BTD, head, targets_BT, weight, z_loss, self.cfg.vocab_size
            if not self.cfg.logit_cap and takes("loss", self.kernels.loss, "mosaic"):
                return cross_entropy_of_shards(*arguments)
            return cross_entropy(*arguments, self.cfg.logit_cap)

    def logits(
        self, tokens_BT, positions_BT, segment_ids_BT=None, *, dtype=jnp.float32
    ) -> jax.Array:
        """Return logits `[B, T, V]` float32 of sequences in natural order: for tests and small models; training uses
        `loss`. A padded vocabulary is gathered, and cut to its words."""
        inputs = LayerInputs.of(
            self.cfg, positions_BT, segment_ids_BT, context=NATURAL, dtype=dtype
        )
        x_BTD = gather_sequence(self(tokens_BT, inputs).x_BRD, "V")
        logits_BTV, words = self.unembed(x_BTD, self.head_weight(dtype)), self.cfg.vocab_size
        if logits_BTV.shape[-1] == words:
            return logits_BTV
        return place(logits_BTV, act("BT_"))[..., :words]

    def unembed(self, x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
        """Return logits `[B, T, V]` float32 of hidden states after the final norm: of `logits` and `generate`."""
        logits_BTV = einsum("BTD,DV->BTV", x_BTD, head_DV, dtype=jnp.float32)
        return capped(logits_BTV, self.cfg.logit_cap)


def map_with_order[Tree](fn: Callable[..., Any], tree: Tree, *trees: Tree) -> Tree:
    """Return `fn(order, array, *arrays of trees)` for each array of a tree.

    In a `Transformer` the order is that of the array's stack; an array of no stack has None.
    """

    def is_model(x: object) -> bool:
        return isinstance(x, Transformer)

    def leaves(order: LayerOrder | None, *trees):
        return jax.tree.map(functools.partial(fn, order), *trees)

    def node(x, *same):
        if not is_model(x):
            return fn(None, x, *same)
        models = x, *same
        rows = zip(x.orders, *(model.stacks for model in models), strict=True)
        stacks = [leaves(*row) for row in rows]
        return leaves(None, *(model.with_stacks(()) for model in models)).with_stacks(stacks)

    return jax.tree.map(node, tree, *trees, is_leaf=is_model)
