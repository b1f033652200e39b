"""Judge a step before it changes anything: its loss, its gradients and the update must be finite, and no spike."""

import dataclasses

import jax
import jax.numpy as jnp

from ultrascale_jax.config import Config
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.train_step.loss_scale import LEAST
from ultrascale_jax.train_step.optim import first_moments_norm, global_norm
from ultrascale_jax.train_step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Judgement of a step by its loss and gradient norm."""

    finite: jax.Array
    """Loss and norm are finite."""
    ok: jax.Array
    """The step may change the state: loss, gradients and update are finite, it is no spike, and has a target."""
    spike: jax.Array | None
    """The step is a spike; None without `watch.spike_sigma`."""


def judge(
    cfg: Config,
    state: TrainState,
    loss: jax.Array,
    norm: jax.Array,
    terms: jax.Array,
    *,
    built_in: bool,
) -> Verdict:
    """Judge a step by its loss, its gradient norm and the number of its terms.

    With a `built_in` optimizer, also by the first moments before it: `check_update` need not read the update.
    """
    finite, spike = jnp.isfinite(loss) & jnp.isfinite(norm), None
    ok = finite & (terms > 0)
    if built_in:
        ok &= jnp.isfinite(jnp.square(norm) + first_moments_norm(state.opt_state))
    if state.spikes is not None:
        spike = finite & state.spikes.is_spike(loss, norm, cfg.watch.spike_sigma)
        ok &= ~spike
    return Verdict(finite, ok, spike)


def check_update(verdict: Verdict, updates: Transformer) -> Verdict:
    """Refuse an update of a model's own optimizer that is not finite."""
    return dataclasses.replace(verdict, ok=verdict.ok & jnp.isfinite(global_norm(updates)))


def keep[Tree](new: Tree, old: Tree, verdict: Verdict) -> Tree:
    """Return `new` of a step that may change the state, and `old` of one that may not."""
    return jax.tree.map(lambda new, old: jnp.where(verdict.ok, new, old), new, old)


def after(
    state: TrainState,
    verdict: Verdict,
    loss: jax.Array,
    norm: jax.Array,
    terms: jax.Array,
) -> TrainState:
    """Return the state with the counts of steps, the loss scale and the spike window after a step.

    A step that is skipped while the loss scale can still fall does not count towards those in a row.
    """
    spikes, scaling = state.spikes, state.loss_scale
    if spikes is not None:
        spikes = spikes.after(verdict.ok, loss, norm)
    bad = counted = (~verdict.ok).astype(jnp.int32)
    if scaling is not None:
        counted = bad * (verdict.finite | (scaling.scale <= LEAST))
        new = scaling.after(verdict.finite)
        scaling = jax.tree.map(lambda new, old: jnp.where(terms > 0, new, old), new, scaling)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        skipped=state.skipped + bad,
        skipped_in_a_row=(state.skipped_in_a_row + counted) * bad,
        loss_scale=scaling,
        spikes=spikes,
    )


def metrics(state: TrainState, verdict: Verdict) -> dict[str, jax.Array]:
    """Return `skipped`, `spike` where spikes are looked for, and in float16 `loss_scale`, which was the step's."""
    values = {"skipped": ~verdict.ok}
    if verdict.spike is not None:
        values["spike"] = verdict.spike
    if state.loss_scale is not None:
        values["loss_scale"] = state.loss_scale.scale
    return values
