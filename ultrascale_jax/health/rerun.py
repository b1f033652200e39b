"""The step as the loop takes it: with `watch.rerun`, a suspicious one is taken twice.

A step that is skipped has bad data, a model that diverges, or a device that computed wrong numbers. Run again from the
same state and batch, the first two give the same bits (the fault is *persistent*); where the second result differs the
hardware was at fault (*transient*), and the second one is taken. Megatron's rerun state machine goes by the same rule.
It holds for a program that is deterministic: on GPUs with --xla_gpu_deterministic_ops=true.

It costs memory for a second state, which is otherwise donated, and each step waits for the host to look at it.
"""

from collections.abc import Callable

import jax
import numpy as np

from ultrascale_jax.health import array_faults
from ultrascale_jax.health.skipped_steps import suspicious
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.faults import Plan
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.train_step.state import TrainState

LOOKED_AT = ("loss", "grad_norm", "skipped")


class Steps:
    """The compiled step of one run."""

    def __init__(self, compiled: Callable, rerun: bool, faults: Plan, events: Events):
        self._compiled, self._rerun, self._faults, self._events = compiled, rerun, faults, events

    def take(self, step: int, state: TrainState, batch: dict, digest: str) -> tuple:
        """State and metrics after optimizer step `step`, on a batch with the hash `digest`."""
        kinds = [kind for kind in array_faults.FACTORS if self._faults.due(kind, step)]
        if kinds:
            new, metrics = array_faults.through_fault(self._compiled, kinds[0], state, batch)
        else:
            new, metrics = self._compiled(state, batch)
        # The step communicates, so all processes run it again or none does.
        if self._rerun and agree("again" if suspicious(jax.device_get(metrics)) else None):
            new, metrics = self._again(step, state, batch, digest, metrics)
        if self._faults.due("flip", step):
            new = array_faults.flipped(new)
        return new, metrics

    def _again(self, step: int, state: TrainState, batch: dict, digest: str, first: dict) -> tuple:
        new, second = self._compiled(state, batch)
        runs = [[np.asarray(metrics[name]) for name in LOOKED_AT] for metrics in (first, second)]
        same = all(a.tobytes() == b.tobytes() for a, b in zip(*runs, strict=True))
        if jax.process_index() == 0:
            seen = {name: [run[i].item() for run in runs] for i, name in enumerate(LOOKED_AT)}
            verdict = "persistent" if same else "transient"
            self._events.record("rerun", step=step, verdict=verdict, batch_hash=digest, **seen)
        return new, second
