"""Learning-rate schedule and optimizer, both from optax."""

import jax
import jax.numpy as jnp
import optax

from ultrascale_jax.config import Config
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.sharding import is_matrix


def schedule(cfg: Config) -> optax.Schedule:
    """Learning rate at an optimizer step: linear warm-up, then what `optim.schedule` names, ending at `min_lr * lr`."""
    optim, steps = cfg.optim, cfg.train.steps
    warmup = optax.linear_schedule(0.0, optim.lr, optim.warmup_steps)
    rest = max(steps - optim.warmup_steps, 1)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(optim.lr, rest, alpha=optim.min_lr)
    elif optim.schedule == "wsd":
        decay = min(optim.decay_steps or max(steps // 5, 1), rest)
        down = optax.linear_schedule(optim.lr, optim.min_lr * optim.lr, decay)
        after = optax.join_schedules([optax.constant_schedule(optim.lr), down], [rest - decay])
    else:
        after = optax.constant_schedule(optim.lr)
    return optax.join_schedules([warmup, after], [optim.warmup_steps]) if optim.warmup_steps else after


def optimizer(cfg: Config) -> optax.GradientTransformation:
    """AdamW, or Muon for the blocks' matrices with AdamW for the rest; weight decay on matrices only."""
    optim = cfg.optim
    adamw = optax.adamw(
        schedule(cfg),
        b1=optim.betas[0],
        b2=optim.betas[1],
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=lambda params: map_params(lambda _, dims, on: is_matrix(dims), params),
        mu_dtype=jnp.dtype(optim.moment_dtype),
    )
    if optim.name == "adamw":
        return adamw
    muon = optax.contrib.muon(
        schedule(cfg),
        beta=optim.betas[1],
        weight_decay=optim.weight_decay,
        mu_dtype=jnp.dtype(optim.moment_dtype),
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: map_params(
            lambda _, dims, on: _matrix_axes(dims), params
        ),
    )
    return optax.partition(
        {"muon": muon, "adamw": adamw},
        lambda params: map_params(lambda _, dims, on: "muon" if _in_block(dims) else "adamw", params),
    )


def _in_block(dims: str) -> bool:
    return dims.startswith("L") and is_matrix(dims)


def _matrix_axes(dims: str) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dims of a stacked parameter are the rows (in) and columns (out) of the matrix that Muon orthogonalises."""
    if not _in_block(dims):
        return None
    model = dims.index("D")
    other = tuple(i for i in range(1, len(dims)) if i != model)
    rows, columns = ((model,), other) if model == 1 else (other, (model,))
    return optax.contrib.MuonDimensionNumbers(rows, columns)


def global_norm(tree: object) -> jax.Array:
    """Square root of the sum of squares of all leaves, float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
