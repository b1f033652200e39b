"""Experts in place of the feed-forward layer: a router, the experts that it chooses for each token, shared experts.

The router is computed in float32. Its statistics (`Routed.statistics_Z`) are an auxiliary result: each device's own sum
over its tokens, added up over micro-batches like gradients, and over devices once a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Experts, KernelsConfig, ModelConfig, MoEConfig
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.kernels.device import takes
from ultrascale_jax.models.fp8 import Fp8Weight, Recipe, is_variable, multiply
from ultrascale_jax.models.layers import INIT_STD, MLP, param
from ultrascale_jax.models.linear import linear
from ultrascale_jax.parallel.adapted import Adapted, base_of, with_base
from ultrascale_jax.parallel.experts.capacity import DENSE_OR_SHARED
from ultrascale_jax.parallel.experts.exchange import expert_layer
from ultrascale_jax.parallel.experts.local import Product
from ultrascale_jax.sharding.manual import leave_partial, smap
from ultrascale_jax.sharding.rules import (
    act,
    act_axes,
    axes_of,
    place,
    specs,
    stored_spec,
    vary,
    varying,
)


def route(
    logits: jax.Array, experts: Experts, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the experts of each token, token-choice.

    Args:
      logits: `[n, X]` float32.
      experts: how scores are made, and how many are chosen, from which groups.
      bias: `[X]` float32, added to the scores where experts are chosen, not where they are weighed.

    Returns:
      Their numbers `[n, k]` int32, highest score first; their weights `[n, k]` float32; and the probabilities `[n, X]`
      of all experts (scores over their sum), which balancing losses use.
    """
    scores = jax.nn.softmax(logits) if experts.scores == "softmax" else jax.nn.sigmoid(logits)
    preferences = jax.lax.stop_gradient(scores if bias is None else scores + bias[None])
    if experts.groups > 1:
        grouped = preferences.reshape(-1, experts.groups, experts.num // experts.groups)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[2]))[0].sum(2)
        chosen = jax.lax.top_k(best, experts.groups_per_token)[1]
        open_ = jnp.any(chosen[:, :, None] == jnp.arange(experts.groups)[None, None], axis=1)
        preferences = jnp.where(open_[:, :, None], grouped, -jnp.inf).reshape(preferences.shape)
    ids = jax.lax.top_k(preferences, experts.top_k)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if experts.normalize:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    probabilities = scores
    if experts.scores == "sigmoid":
        probabilities = scores / (scores.sum(1, keepdims=True) + 1e-20)
    return ids, weights * experts.scale, probabilities


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """A router's addition to the objective, and its statistics."""

    balance_BR: jax.Array
    """Each token's term of the objective for the balance of experts; float32."""
    statistics_Z: jax.Array
    """Float32 `[num + 1]`: tokens that chose each expert, and the sum of the entropies in nats. A partial sum over the
    axes that split tokens; it has no gradient."""


def num_statistics(experts: Experts) -> int:
    """Return the length of `Routed.statistics_Z`: a load for each expert, and the entropy."""
    return experts.num + 1


STATISTICS_AXES = "BR"
"""Dims of an activation over whose axes `Routed.statistics_Z` is a partial sum."""


class SharedExperts(MLP):
    """The experts that every token visits: one gated layer, whose result a gate for the token may weigh."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        assert cfg.experts is not None
        super().__init__(cfg, key, cfg.experts.shared * cfg.expert_d_ff)
        if cfg.experts.shared_gate:
            self.w_score = param(jax.random.fold_in(key, 3), "DX", "BRD", (cfg.d_model, 1))

    def __call__(self, x_BRD: jax.Array) -> jax.Array:
        """Map `[B, R, D]` to `[B, R, D]`."""
        y_BRD = super().__call__(x_BRD)
        if not hasattr(self, "w_score"):
            return y_BRD
        score_BRX = linear("BRD,DX->BRX", x_BRD, self.w_score[...].astype(x_BRD.dtype))
        weight_BRX = jax.nn.sigmoid(score_BRX.astype(jnp.float32))
        return (weight_BRX * y_BRD.astype(jnp.float32)).astype(y_BRD.dtype)


type Dense = tuple[jax.Array, Callable[[MLP | None, jax.Array], tuple[jax.Array, Any]]]
"""Whether a layer has no experts, a boolean scalar, and a function of the shared experts and x that gives, for x, the
result of the layer in place of all experts, or else of the shared ones, and something to return."""


class MoE(nnx.Module):
    """A layer of experts; routed ones are split over ep, each one's F and the shared ones' over the tensor group, or
    after `fold_experts` over ep and sp, each whole."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, kernels: KernelsConfig = AUTO):
        assert cfg.experts is not None
        self.cfg, self.kernels, experts = cfg, kernels, cfg.experts
        E, D, F = experts.num, cfg.d_model, cfg.expert_d_ff
        k_router, k_gate, k_up, k_down, k_shared = jax.random.split(key, 5)
        self.w_router = param(k_router, "DX", "BRD", (D, E))
        if experts.bias:
            self.bias = param(None, "X", "BRX", (E,), std=0)
        if cfg.is_gated:
            self.w_gate = param(k_gate, "EDF", "BTD", (E, D, F))
        self.w_up = param(k_up, "EDF", "BTD", (E, D, F))
        if experts.biases:
            self.b_router = param(None, "X", "BRX", (E,), std=0)
            self.b_gate = param(None, "EF", "BTF", (E, F), std=0)
            self.b_up = param(None, "EF", "BTF", (E, F), std=0)
            self.b_down = param(None, "XD", "BRD", (E, D), std=0)
        std = INIT_STD / (2 * cfg.num_layers) ** 0.5
        self.w_down = param(k_down, "EFD", "BTF", (E, F, D), std=std)
        if experts.shared:
            self.shared = SharedExperts(cfg, k_shared)

    def __call__(
        self, x_BRD: jax.Array, moe: MoEConfig, dense: Dense | None = None
    ) -> tuple[jax.Array, Routed, Any]:
        """Map `[B, R, D]` to `[B, R, D]`; return also what the router adds to the objective and did, and what `dense`
        returns besides.

        Where `dense` says so, another layer takes the place of all experts. A pipeline's ranks differ in that: the
        exchange of tokens stays outside of the branches, empty for such a layer, and so overlaps with other work.
        """
        experts = self.cfg.experts
        assert experts is not None
        router, matrices = self._parameters()
        product, matrices = self._product(matrices)
        params, partial = (router, matrices), act("Z", unreduced=axes_of(STATISTICS_AXES))

        def run(x_BRD, params, is_dense):
            arguments = self.cfg, moe, act_axes(self.w_up.dims[0]), product, x_BRD, *params
            y_BRD, balance_BR, statistics_Z = _experts(*arguments, is_dense=is_dense)
            return y_BRD, Routed(balance_BR, leave_partial(statistics_Z, partial.unreduced))

        out_specs = act("BRD"), Routed(act("BR"), partial)  # pyrefly: ignore
        run = smap(run, in_specs=(act("BRD"), specs(params), P()), out_specs=out_specs)
        y_BRD, routed = run(x_BRD, params, None if dense is None else dense[0])
        dense_extra = None
        if dense is not None:
            is_dense, either = dense
            with jax.named_scope(DENSE_OR_SHARED):
                more_BRD, dense_extra = either(self.shared if experts.shared else None, x_BRD)
            y_BRD = y_BRD + more_BRD
            routed = jax.tree.map(lambda a: jnp.where(is_dense, 0, a), routed)
        elif experts.shared:
            y_BRD = y_BRD + self.shared(x_BRD)
        return y_BRD, routed, dense_extra

    def _parameters(self) -> tuple[tuple, tuple]:
        """Return the values of the router (its matrix, the balancing bias, the biases of logits and of results), and
        of the experts (gate, up and down, and the biases of gate and up)."""
        experts, cfg = self.cfg.experts, self.cfg
        assert experts is not None
        biases = (self.b_router, self.b_down) if experts.biases else None
        router = self.w_router, self.bias if experts.bias else None, biases
        matrices = self.w_gate if cfg.is_gated else None, self.w_up, self.w_down
        matrices += (self.b_gate, self.b_up) if experts.biases else ()
        return jax.tree.map(lambda p: p[...], (router, matrices), is_leaf=is_variable)

    def _product(self, matrices: Sequence) -> tuple[Product | None, Sequence]:
        """Return the product of the experts, None for the grouped kernel, and the matrices as it takes them."""
        if isinstance(base_of(matrices[1]), Fp8Weight):
            values = (getattr(base_of(w), "value", base_of(w)) for w in matrices)
            placed = [with_base(*pair) for pair in zip(matrices, values, strict=True)]
            return functools.partial(_fp8_product, base_of(matrices[1]).recipe), placed
        # The kernel adds no adapters.
        adapted = any(isinstance(w, Adapted) for w in matrices)
        fused = takes("grouped_matmul", self.kernels.grouped_matmul, "mosaic") and not adapted
        return None if fused else jnp.einsum, matrices


FOLDED = str.maketrans("EFT", "YWR")


def fold_experts[M](model: M) -> M:
    """Place the routed experts of `model` over ep and sp, each whole (MoE parallel folding, arXiv 2504.14960)."""

    def fold(param: nnx.Variable) -> nnx.Variable:
        if "E" not in param.dims:
            return param
        dims, act_dims = param.dims.translate(FOLDED), param.act_dims.translate(FOLDED)
        value = param.get_value()
        stacked = "L" * (value.ndim - len(dims)) + dims
        placed = place(value, stored_spec(stacked, value.shape))
        return param.replace(placed, dims=dims, act_dims=act_dims)

    def leaf(node):
        is_layer = isinstance(node, MoE)
        return jax.tree.map(fold, node, is_leaf=is_variable) if is_layer else node

    return jax.tree.map(leaf, model, is_leaf=lambda node: isinstance(node, MoE))


def unfolded(dims: str) -> str:
    """Return the dims that a parameter of experts has without `fold_experts`."""
    return dims.translate(str.maketrans("YW", "EF")) if dims.startswith("Y") else dims


def _fp8_product(recipe: Recipe, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply `[E, M, K]` by `[E, K, N]` in fp8, which `subscripts` say in another order: `ECD,DEF->ECF`, say."""
    rows, matrices, out = subscripts.replace("->", ",").split(",")
    return multiply(recipe, x, jnp.einsum(f"{matrices}->{rows[0]}{rows[-1]}{out[-1]}", w))


def _experts(
    cfg: ModelConfig,
    moe: MoEConfig,
    axes_of_experts: tuple[str, ...],
    product: Product | None,
    x_BRD,
    router,
    matrices,
    is_dense,
):
    """Run the layer on this device's tokens, without shared experts; return the result and both parts of `Routed`."""
    experts, (B, R, D) = cfg.experts, x_BRD.shape
    assert experts is not None
    x, axes = x_BRD.reshape(-1, D), varying(x_BRD)
    w_router, bias, biases = jax.tree.map(lambda a: vary(a, axes), router)
    logits = jnp.dot(x.astype(jnp.float32), w_router, precision="highest")
    logits = logits if biases is None else logits + biases[0][None]
    ids, weights, probabilities = route(logits, experts, bias)
    # A pipeline's idle ticks and padding are zeros: being equal, they would all go to the same experts.
    routed = jnp.any(x != 0, axis=1, keepdims=True)
    ids = jnp.where(routed if is_dense is None else routed & ~is_dense, ids, -1)
    w_gate, w_up, w_down, *hidden_biases = matrices
    y, _ = expert_layer(
        x, ids, weights, w_gate, w_up, w_down, axis=axes_of_experts,
            moe=moe, experts=experts, product=product,
        activation=cfg.activation, biases=tuple(hidden_biases) or None, distinct=True,
        idles=is_dense is not None,
    )  # fmt: skip
    if "tp" in varying(y) - axes:
        y = jax.lax.psum(y, "tp")
    is_chosen = ids[:, :, None] == jnp.arange(experts.num)[None, None]
    if biases is not None:
        # The last product's biases need no expert: a token adds them where it is, by its weights.
        weights_X = jnp.sum(jnp.where(is_chosen, weights[:, :, None], 0), axis=1)
        y = (y + jnp.dot(weights_X, biases[1], precision="highest")).astype(y.dtype)
    chosen_BRX = jnp.sum(is_chosen, axis=1, dtype=jnp.float32).reshape(B, R, -1)
    balance_BR = _balance(moe, logits, probabilities, chosen_BRX)
    statistics_Z = vary(_statistics(probabilities, chosen_BRX), axes)
    return y.reshape(B, R, D), vary(balance_BR, axes), statistics_Z


def _statistics(probabilities, chosen_BRX: jax.Array) -> jax.Array:
    """Return `Routed.statistics_Z`."""
    entropy = -jnp.sum(probabilities * jnp.log(probabilities + 1e-20))
    return jax.lax.stop_gradient(jnp.concatenate([chosen_BRX.sum((0, 1)), entropy[None]]))


def _balance(moe: MoEConfig, logits, probabilities, chosen_BRX: jax.Array) -> jax.Array:
    """Return `Routed.balance_BR`; logits and probabilities are `[B * R, X]`."""
    B, R, _ = chosen_BRX.shape
    balance_BR = jnp.zeros((B, R), jnp.float32)
    if moe.aux_weight:
        probabilities_BRX = probabilities.reshape(B, R, -1)
        balance_BR += moe.aux_weight * _imbalance(probabilities_BRX, chosen_BRX, moe.aux_over)
    if moe.z_loss:
        lse = jax.nn.logsumexp(logits, axis=1)
        balance_BR += moe.z_loss * jnp.square(lse).reshape(B, R)
    return balance_BR


def _imbalance(p_BRX: jax.Array, chosen_BRX: jax.Array, over: str) -> jax.Array:
    """Return, per token, num * sum of probability times each expert's share of choices; 1 where all have the same.

    The shares are of a micro-batch over all devices, or of the token's sequence (DeepSeek-V3, equations 17 to 20).
    """
    dims, axes = ((0, 1), axes_of("BR")) if over == "batch" else ((1,), axes_of("R"))
    counts = jax.lax.psum(jnp.sum(chosen_BRX, dims, keepdims=True), tuple(sorted(axes)))
    share = counts / jnp.maximum(jnp.sum(counts, axis=2, keepdims=True), 1)
    return p_BRX.shape[2] * jnp.sum(p_BRX * share, axis=2)
