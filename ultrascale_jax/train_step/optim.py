"""Learning-rate schedule and optimizer, both from optax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ultrascale_jax.config import Config
from ultrascale_jax.models.layers import each_param, map_params
from ultrascale_jax.sharding.memories import is_on_host
from ultrascale_jax.sharding.rules import is_matrix
from ultrascale_jax.train_step.muon import is_orthogonalized, scale_by_muon
from ultrascale_jax.train_step.precision import COMPUTE
from ultrascale_jax.train_step.rounding import in_bfloat16


def schedule(cfg: Config) -> optax.Schedule:
    """Return the learning rate by optimizer step: linear warm-up, then `optim.schedule`, to `min_lr_ratio * lr`.

    Update k of the warm-up, counted from 1, has k/warmup_steps of the peak, so that none has a rate of 0. Its last one
    has the peak, or without a warm-up the first of the run; the decay begins after it and ends with the last update.
    """
    optim = cfg.optim
    peak = max(optim.warmup_steps, 1) - 1
    updates = cfg.train.steps - 1 - peak
    falling = optax.constant_schedule(optim.lr)
    if optim.schedule == "cosine" and updates > 0:
        falling = optax.cosine_decay_schedule(optim.lr, updates, alpha=optim.min_lr_ratio)
    elif optim.schedule == "wsd" and updates > 0:
        decay = min(optim.decay_steps or max(cfg.train.steps // 5, 1), updates)
        down = optax.linear_schedule(optim.lr, optim.min_lr_ratio * optim.lr, decay)
        falling = optax.join_schedules([falling, down], [updates - decay])
    if not peak:
        return falling
    warmup = optax.linear_schedule(optim.lr / optim.warmup_steps, optim.lr, peak)
    return optax.join_schedules([warmup, falling], [peak])


def rate_change(saved: Config, now: Config, updates: int) -> list[str]:
    """Return a line on the learning rates of a run that resumes after `updates` with settings other than the `saved`.

    There is none if neither `train.steps` nor a setting of the schedule is another, before the first update, and after
    the last one.
    """
    same = now.train.steps == saved.train.steps
    names = ("lr", "min_lr_ratio", "schedule", "warmup_steps")
    same &= all(getattr(now.optim, name) == getattr(saved.optim, name) for name in names)
    if same or not 0 < updates < now.train.steps:
        return []
    points = (saved, updates), (now, updates), (now, now.train.steps - 1)
    saved_lr, lr, last_lr = (jnp.asarray(schedule(cfg)(n)).item() for cfg, n in points)
    return [
        f"learning rate of update {updates + 1}: {lr:.2e}, by the saved settings {saved_lr:.2e}; "
        f"of the last, {now.train.steps}: {last_lr:.2e}"
    ]


def optimizer(cfg: Config, row: jax.Array | None = None) -> optax.GradientTransformation:
    """Return the optimizer of `cfg.optim`, for models whose `make_optimizer` returns None.

    That is AdamW, or Muon for the blocks' matrices with AdamW for the rest; weight decay on matrices only. It updates
    all rows of the stacks, or `row` alone, of the rows of each rank of a pipeline (`offload.update`).
    """
    optim = cfg.optim
    adam: Callable = functools.partial(
        optax.scale_by_adam, b1=optim.betas[0], b2=optim.betas[1], eps=optim.eps
    )
    if optim.stochastic_rounding:
        scale = in_bfloat16(adam(), cfg.train.seed, row)
    else:
        scale = adam(mu_dtype=jnp.dtype(optim.moment_dtype))
    if optim.name == "muon":
        scale = _muon(cfg, scale)
    matrices: Callable = functools.partial(map_params, lambda _, dims, act_dims: is_matrix(dims))
    # As `optax.adamw`.
    return optax.chain(
        scale,
        optax.add_decayed_weights(optim.weight_decay, matrices),
        optax.scale_by_learning_rate(schedule(cfg)),
    )


def _muon(cfg: Config, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `scale_by_muon` for the blocks' matrices and `adam` for the rest; its state has lists of all leaves."""
    optim, dtype = cfg.optim, COMPUTE[cfg.train.precision]
    # Float16 has too small a range for the momentum of small gradients.
    dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype

    def transformation(params):
        dims = each_param(lambda value, dims, act_dims: dims, params)
        stacks = [of for of in dims if is_orthogonalized(of)]
        muon = scale_by_muon(stacks, optim.betas[1], jnp.dtype(optim.moment_dtype), dtype)
        names = ["muon" if is_orthogonalized(of) else "adam" for of in dims]
        return optax.partition({"muon": muon, "adam": adam}, names)

    def init(params):
        return transformation(params).init(jax.tree.leaves(params))

    def update(grads, state, params):
        leaves, tree = jax.tree.flatten(grads)
        updates, state = transformation(params).update(leaves, state, jax.tree.leaves(params))
        return jax.tree.unflatten(tree, jax.tree.leaves(updates)), state

    return optax.GradientTransformation(init, update)  # pyrefly: ignore


def clip_factor(cfg: Config, scale: jax.Array, norm: jax.Array) -> jax.Array:
    """Return the gradients' factor: `scale`, or less where `norm`, which has it, exceeds `optim.clip_norm`."""
    if not cfg.optim.clip_norm:
        return scale
    return scale * jnp.minimum(1.0, cfg.optim.clip_norm / jnp.maximum(norm, 1e-30))


def global_norm(tree: object) -> jax.Array:
    """Return the square root of the sum of squares of all leaves, float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def first_moments_norm(opt_state: Any) -> jax.Array:
    """Return the norm of the first moments on the device, float32.

    If that of all and the square of the gradients' norm are finite, so is the update: AdamW divides the next first
    moments by at least `optim.eps`, and Muon normalises them. Moments in the host's memory are means of gradients that
    were finite; reading them would take half as long as the update.
    """
    moments = jax.tree.leaves([mu for _, mu in optax.tree.get_all_with_path(opt_state, "mu")])
    return global_norm([mu for mu in moments if not is_on_host(mu)] or jnp.float32(0))
