"""One layer of the decoder, `Block`, and the classes of its parts, `Layers`."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import KernelsConfig, ModelConfig, MoEConfig, require
from ultrascale_jax.kernels.xla import gradients_together
from ultrascale_jax.models.fp8 import in_fp8, is_variable
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import (
    MLP,
    gather_fp8,
    param,
    rms_norm,
    scatter_sequence,
    zero_sizes,
)
from ultrascale_jax.models.mixers import mixer
from ultrascale_jax.models.moe import Dense, MoE, Routed
from ultrascale_jax.parallel.adapted import Adapted
from ultrascale_jax.sharding.primitives import (
    broadcast_param,
    gather_param,
    partial_axes,
)
from ultrascale_jax.sharding.rules import TENSOR, mesh_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """Classes of the parts of each layer; `docs/layers.md` has the contract.

    A subclass of `Transformer` names its own: `layers = Layers(mlp=SquaredReLU)`. Experts (`model.experts`) keep their
    own layer. `Transformer.layer_terms` names the terms that parts return.
    """

    attention: Callable[..., Any] | None = None
    """`(cfg, key, kernels) -> module`; the module maps `(x_BRD, inputs)` to partial sums `[B, T, D]` of the tensor
    group and the cache[, and a dict of terms]. None is that of `mixers.py`."""
    mlp: Callable[..., Any] = MLP
    """`(cfg, key) -> module`; the module maps x_BRD to `[B, R, D]`, in x's type, or to that and a dict of terms."""
    norm: Callable[..., Any] | None = None
    """`(cfg) -> module`; the module maps x_BRD to `[B, R, D]`, in x's type. None is RMSNorm. It stands before (or
    after, `model.norm_placement`) both halves of a layer, and before the head."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fix = "must be a class, or a function that makes a module"
            require(value is field.default or callable(value), f"layers.{field.name}", value, fix)

    def make_norm(self, cfg: ModelConfig) -> Any:
        """Make a norm of the residual stream: a module, or the scale of RMSNorm."""
        if self.norm is None:
            return param(None, "D", "BRD", (cfg.d_model,), std=1)
        return _with_call("norm", self.norm(cfg), "x_BRD")

    @property
    def own(self) -> dict[str, str]:
        """The names of the classes that are not the built-in ones."""
        classes = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: _name(cls) for name, (cls, default) in classes.items() if cls is not default}


type Terms = dict[str, jax.Array]
"""Float32 scalars by name that a layer's parts return."""


def _name(cls: Any) -> str:
    return getattr(cls, "__name__", str(cls))


def _with_call(part: str, module: Any, *arguments: str) -> Any:
    """Return a part's module; refuse one that cannot be called with these positional arguments."""
    try:
        inspect.signature(module).bind(*arguments)
    except TypeError as error:
        fix = f"makes a module that must be callable with ({', '.join(arguments)}): {error}"
        require(False, f"layers.{part}", _name(type(module)), fix)
    return module


def _check_result(part: str, module: Any, y: Any, like: jax.Array) -> None:
    """Refuse a part's result that is not split and typed as the residual stream `like`."""
    returned, expected = jax.typeof(y), jax.typeof(like)
    same = (returned.shape, returned.dtype) == (expected.shape, expected.dtype)
    same = same and returned.sharding.spec.partitions == expected.sharding.spec.partitions
    fix = (
        f"returned {returned}, and must return {expected}, like the residual stream: `linear(..., to='BRD')`, "
        "in x's type"
    )
    require(same, f"layers.{part}", _name(type(module)), fix)


def _check_cache(module: Any, cache: Cache | None, inputs: LayerInputs) -> None:
    """Refuse an attention that returns no cache where there is one."""
    fix = "returned no cache, which generation needs; `attend` returns one"
    has_cache = inputs.cache is None or cache is not None
    require(has_cache, "layers.attention", _name(type(module)), fix)


def _checked_terms(part: str, module: Any, terms: Any) -> Terms:
    """Return the terms that a part returned; refuse all but float32 scalars by name."""

    def is_scalar(value: Any) -> bool:
        kind = jax.typeof(value)
        is_whole = not kind.sharding.spec.unreduced
        return kind.shape == () and kind.dtype == jnp.float32 and is_whole

    fits = isinstance(terms, dict) and all(map(is_scalar, jax.tree.leaves(terms)))
    kinds = jax.tree.map(lambda value: str(jax.typeof(value)), terms)
    fix = (
        f"returned the terms {kinds}, and must return a dict of float32 scalars, means over tokens"
    )
    require(fits, f"layers.{part}", _name(type(module)), fix)
    return terms


def _joined(attention: Terms, mlp: Terms) -> Terms:
    """Return the terms of a layer's parts; refuse a name of both."""
    both = sorted(attention.keys() & mlp.keys())
    require(not both, "layers", both, "attention and MLP return terms of this name; rename one")
    return attention | mlp


def _summed(module: Any, y: Any) -> jax.Array:
    """Return `[B, R, D]` of an attention's partial sums `[B, T, D]`, or of these and terms `[B, R, D]`.

    Refuses a complete sum: in a pipeline it would be added up once more.
    """
    partial_BTD, *terms_BRD = y if isinstance(y, tuple) else (y,)
    axes = {axis for axis in TENSOR if mesh_size(axis) > 1}
    fix = (
        f"returned {jax.typeof(partial_BTD)}, and must return partial sums over {', '.join(TENSOR)}: "
        "`linear('BTNH,NHD->BTD', ..., partial=True)`"
    )
    require(axes <= partial_axes(partial_BTD), "layers.attention", _name(type(module)), fix)
    return sum(terms_BRD, scatter_sequence(partial_BTD))


def _together(inputs: LayerInputs, *trees: Any) -> tuple:
    """Return the input and the weights of an operation, whose gradients wait for each other if `Lowering` says so."""
    return gradients_together(trees) if inputs.lowering.gradients_together else trees


class Block(nnx.Module):
    """One layer: attention and MLP or experts, each with its norm and residual connection, or one of the two alone
    (`model.pattern`); `number` is any layer of the model that is of its kind.

    A stack of equal layers is a block, too, each of whose parameters has a leading L.
    """

    def __init__(
        self,
        layers: Layers,
        cfg: ModelConfig,
        number: int,
        kernels: KernelsConfig,
        key: jax.Array,
    ):
        self.cfg, self.kernels = cfg, kernels
        k_attention, k_feed_forward = jax.random.split(key)
        if cfg.mixers(number):
            attention = layers.attention or mixer(cfg, number)
            of_layer = attention(cfg.of_layer(number), k_attention, kernels)
            self.attn = _with_call("attention", of_layer, "x_BRD", "inputs")
            self._add_norms("attn", layers)
        feed_forward = cfg.feed_forward(number)
        if feed_forward == "moe":
            self.moe = MoE(cfg, k_feed_forward, kernels=kernels)
        elif feed_forward == "mlp":
            self.mlp = _with_call("mlp", layers.mlp(cfg, k_feed_forward), "x_BRD")
        if feed_forward is not None:
            self._add_norms("mlp", layers)
        if cfg.layer_scale:
            self.scale = param(None, "X", "BRX", (1,), std=1)

    def _add_norms(self, half: str, layers: Layers) -> None:
        setattr(self, f"{half}_norm", layers.make_norm(self.cfg))
        if self.cfg.norm_placement == "both":
            setattr(self, f"{half}_out_norm", layers.make_norm(self.cfg))

    @property
    def feed_forward(self) -> Any:
        """The layer's experts, or else its MLP, or None."""
        return getattr(self, "moe", None) or getattr(self, "mlp", None)

    def gather_params(self, inputs: LayerInputs) -> "Block":
        """Return this layer with full parameters: ZeRO-3's all-gathers; operands of fp8 products are `Fp8Weight`s, and
        weights with an adapter `Adapted`s."""
        return attach_adapters(gather_layer(self, self.cfg, inputs))

    def __call__(
        self, x_BRD: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Routed | None, Cache | None, Terms]:
        """Map `[B, R, D]` to `[B, R, D]`; parameters as `gather_params` returns them, with one feed-forward layer.

        The second result is what the router of experts did, if there is one; the third the cache; the fourth the terms
        that the parts returned.

        In the backward pass, the reduce-scatter out of the MLP and the all-gather into attention overlap with the MLP's
        weight gradients, and the reduce-scatter out of attention with attention's.
        """
        x_BRD, cache, feed_forward, of_attention = self.attend(x_BRD, inputs)
        x_BRD, routed, _, of_mlp = self.feed(x_BRD, feed_forward, inputs.moe)
        return x_BRD, routed, cache, _joined(of_attention, of_mlp)

    def attend(
        self, x_BRD: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Cache | None, Any, Terms]:
        """Run the first half: the residual stream, the cache, the feed-forward layer as the second half uses it, and
        the attention's terms."""
        x_BRD = checkpoint_name(x_BRD, "layer_input")
        if not hasattr(self, "attn"):
            return x_BRD, inputs.cache, self.feed_forward, {}
        with jax.named_scope("attention"):
            h_BRD = self._before(x_BRD, "attn_norm")
            h_BRD, attn = _together(inputs, h_BRD, self.attn)
            returned = attn(h_BRD, inputs)
            fix = "must return its partial sums and the cache, or None in its place: (partial_BTD, cache[, terms])"
            is_pair = isinstance(returned, tuple) and len(returned) in (2, 3)
            require(is_pair, "layers.attention", _name(type(attn)), fix)
            h, cache, *terms = returned
            _check_cache(attn, cache, inputs)
            terms = _checked_terms("attention", attn, terms[0]) if terms else {}
            h, feed_forward = _together(inputs, h, self.feed_forward)
            h_BRD = checkpoint_name(_summed(attn, h), "attn_out")
            x_BRD = x_BRD + self._scaled(self._after(h_BRD, "attn_norm", "attn_out_norm"))
            return x_BRD, cache, feed_forward, terms

    def feed(
        self, x_BRD: jax.Array, feed_forward: Any, moe: MoEConfig, dense: Dense | None = None
    ) -> tuple[jax.Array, Routed | None, Any, Terms]:
        """Run the second half: the residual stream, what the router of experts did, what `dense` returns besides, and
        the MLP's terms.

        With `dense` the layer has experts or not, as an array says (`MoE.__call__`).
        """
        routed, dense_extra, terms = None, None, {}
        if feed_forward is None:
            return x_BRD, routed, dense_extra, terms
        with jax.named_scope("moe" if isinstance(feed_forward, MoE) else "mlp"):
            h = self._before(x_BRD, "mlp_norm")
            if isinstance(feed_forward, MoE):
                h, routed, dense_extra = feed_forward(h, moe, dense)
            else:
                h = feed_forward(h)
                if isinstance(h, tuple):
                    h, returned = h
                    terms = _checked_terms("mlp", feed_forward, returned)
                _check_result("mlp", feed_forward, h, x_BRD)
            h = checkpoint_name(h, "mlp_out")
            x_BRD = x_BRD + self._scaled(self._after(h, "mlp_norm", "mlp_out_norm"))
            if self.cfg.layer_scale:
                # Without a gradient it stays as it is.
                scale = jax.lax.stop_gradient(self.scale[...])
                scale_BRX = broadcast_param(scale, "X", "BRX", (*x_BRD.shape[:2], 1))
                x_BRD = (x_BRD.astype(jnp.float32) * scale_BRX).astype(x_BRD.dtype)
            return x_BRD, routed, dense_extra, terms

    def _before(self, x_BRD: jax.Array, name: str) -> jax.Array:
        """Normalise the input of a half-block, where its norm stands there."""
        if self.cfg.norm_placement == "post":
            return x_BRD
        return checkpoint_name(self._norm(x_BRD, name), name)

    def _after(self, x_BRD: jax.Array, name: str, out_name: str) -> jax.Array:
        """Normalise the output of a half-block: by its only norm, or by the second one, or not."""
        if self.cfg.norm_placement == "post":
            return checkpoint_name(self._norm(x_BRD, name), name)
        return self._norm(x_BRD, out_name) if self.cfg.norm_placement == "both" else x_BRD

    def _scaled(self, y_BRD: jax.Array) -> jax.Array:
        """Multiply the result of a half-block by `residual_scale`, which bfloat16 may not hold."""
        scale = self.cfg.residual_scale
        return y_BRD if scale == 1 else (y_BRD.astype(jnp.float32) * scale).astype(y_BRD.dtype)

    def _norm(self, x_BRD: jax.Array, name: str) -> jax.Array:
        return normed(x_BRD, getattr(self, name), self.cfg, self.kernels)


def gather_layer[Tree](tree: Tree, cfg: ModelConfig, inputs: LayerInputs) -> Tree:
    """Return `Block.gather_params` of a tree of some of a block's parameters, at their paths in it."""
    sizes, fp8 = zero_sizes(cfg, tree), inputs.fp8

    def leaf(path, param):
        value = param.get_value()
        value = value if param.multiplier == 1 else value * param.multiplier
        placed = (value, param.dims, param.act_dims, inputs.dtype, sizes)
        if fp8 is None or not in_fp8(param.dims):
            return param.replace(gather_param(*placed))
        amax = fp8.amaxes.get(jax.tree_util.keystr(path, simple=True, separator="."))
        return param.replace(gather_fp8(*placed, fp8.recipe, amax))

    return jax.tree.map_with_path(leaf, tree, is_leaf=is_variable)


def attach_adapters[Tree](layer: Tree) -> Tree:
    """Return a layer, gathered, in which each weight with an adapter is an `Adapted`."""
    for module in _modules(layer):
        if not hasattr(module, "lora"):
            continue
        for name, adapter in _children(module.lora):
            weight = getattr(module, name)
            pair = adapter.a[...], adapter.b[...]
            setattr(module, name, weight.replace(Adapted(weight[...], *pair, adapter.scale)))
        del module.lora
    return layer


def _modules(module: Any) -> list[Any]:
    """Return a module and all that it has."""
    return [module, *(m for _, child in _children(module) for m in _modules(child))]


def _children(module: Any) -> list[tuple[str, Any]]:
    return [(name, child) for name, child in vars(module).items() if isinstance(child, nnx.Module)]


@jax.named_scope("norm")
def normed(x_BRD: jax.Array, norm: Any, cfg: ModelConfig, kernels: KernelsConfig) -> jax.Array:
    """Apply a norm of `Layers.make_norm`, its parameters unsharded."""
    if is_variable(norm):
        return rms_norm(x_BRD, norm[...], "D", "BRD", cfg.norm_eps, kernels.norm)
    y_BRD = norm(x_BRD)
    _check_result("norm", norm, y_BRD, x_BRD)
    return y_BRD
