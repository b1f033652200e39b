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
    layers = model.num_layers - model.dense_layers + model.mtp_layers
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

    def leaf(path, value):
        match jax.tree_util.keystr(path, simple=True, separator=".").split("."):
            case ["stacks", _, "moe", "bias", "value"]:
                return value + rate * place(missing[: len(value)], specs(value))
            case ["stacks", _, "layers", i, "moe", "bias", "value"]:
                of_layer = missing[int(i) :: cfg.model.layer_group]
                return value + rate * place(of_layer[: len(value)], specs(value))
            case ["mtp", _, "block", "moe", "bias", "value"]:
                return value + rate * next(of_modules)
        return value

    return jax.tree.map_with_path(leaf, params)


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
