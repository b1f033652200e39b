"""Report the routers' statistics of a step as metrics, and move the experts' biases by them."""

import jax
import jax.numpy as jnp

from ultrascale_jax.config import BIAS_RATE, Config
from ultrascale_jax.models.moe import STATISTICS_AXES, num_statistics
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.rules import act, axes_of, place, specs


def statistics_start(cfg: Config) -> jax.Array | None:
    """Return zeros for the statistics `[L, num + 1]` of a step's micro-batches, partial sums; None without experts.

    The rows are the model's layers of experts, then the modules of `model.mtp_layers`.
    """
    model, experts = cfg.model, cfg.model.experts
    if experts is None:
        return None
    routed = [model.feed_forward(layer) == "moe" for layer in range(model.num_layers)]
    layers = sum(routed) + model.mtp_layers
    shape = layers, num_statistics(experts)
    spec = act("LZ", unreduced=axes_of(STATISTICS_AXES))
    return jnp.zeros(shape, jnp.float32, out_sharding=spec)


def reduce_statistics(statistics: jax.Array | None) -> jax.Array | None:
    """Sum statistics over devices: the one reduction of a step."""
    return None if statistics is None else jax.reshard(statistics, act("LZ"))


def rebalanced(cfg: Config, params: Transformer, routed: jax.Array | None) -> Transformer:
    """Raise the biases of experts below the mean load by `moe.bias_rate`, and lower the others.

    This is the loss-free balancing of arXiv 2408.15664, on all choices of a step. Gradients train other biases.
    """
    rate, experts = cfg.moe.bias_rate, cfg.model.experts
    rate = BIAS_RATE if rate is None else rate
    if routed is None or experts is None or not experts.bias or not rate:
        return params
    loads = routed[:, :-1]
    missing = jnp.sign(jnp.mean(loads, axis=1, keepdims=True) - loads)
    modules = cfg.model.mtp_layers
    of_modules = iter(missing[-modules:] if modules else ())

    of_stacks = _rows_of_stacks(cfg, params)

    def leaf(path, value):
        match jax.tree_util.keystr(path, simple=True, separator=".").split("."):
            case ["stacks", stack, *inner, "moe", "bias", "value"]:
                depth = int(inner[1]) if inner else 0
                return value + rate * place(missing[of_stacks[int(stack)][depth]], specs(value))
            case ["mtp", _, "block", "moe", "bias", "value"]:
                return value + rate * next(of_modules)
        return value

    return jax.tree.map_with_path(leaf, params)


def _rows_of_stacks(cfg: Config, params: Transformer) -> list[dict[int, slice]]:
    """Return, for each stack, the rows of statistics of each layer of a row that has experts, by its number there."""
    rows, start = [], 0
    for order, layers in zip(params.orders, cfg.model.stacks, strict=True):
        kinds = [cfg.model.feed_forward(layers.start + depth) for depth in range(layers.step)]
        routed = [depth for depth, kind in enumerate(kinds) if kind == "moe"]
        stop = start + len(order) * len(routed)
        rows.append({d: slice(start + i, stop, len(routed)) for i, d in enumerate(routed)})
        start = stop
    return rows


def metrics(cfg: Config, routed: jax.Array | None) -> dict[str, jax.Array]:
    """Return, of a step's choices over all layers, `moe_load` `[num]`, each expert's over the mean; `moe_max_load`, the
    busiest of any layer over its mean; `moe_entropy`, a router's mean in nats.
    """
    if routed is None:
        return {}
    experts = cfg.model.experts
    assert experts is not None
    loads, entropy = routed[:, :-1], routed[:, -1]
    total = jnp.maximum(jnp.sum(loads), 1.0)
    # A pipeline's padding has no choices.
    mean = jnp.mean(loads, axis=1, keepdims=True)
    mean = jnp.where(mean > 0, mean, 1.0)
    return {
        "moe_load": jnp.sum(loads, axis=0) * experts.num / total,
        "moe_max_load": jnp.max(loads / mean),
        "moe_entropy": jnp.sum(entropy) * experts.top_k / total,
    }
