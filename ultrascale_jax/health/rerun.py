"""Run a suspicious step twice (`watch.rerun`), to tell bad hardware from bad data.

A step that is skipped has bad data, a model that diverges, or a device that computed wrong numbers. Run again from the
same state and batch, the first two give the same bits (the fault is *persistent*); where the second result differs the
hardware was at fault (*transient*), and the second one is taken. Megatron's rerun state machine goes by the same rule.
It holds for a program that is deterministic: on GPUs with --xla_gpu_deterministic_ops=true.

It costs memory for a second state, which is otherwise donated, and each step waits for the host to look at it.
"""

import jax
import numpy as np

from ultrascale_jax.health.skipped_steps import suspicious
from ultrascale_jax.hooks import Batch, Hook, Metrics, Run, StepFn
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.train_step.state import TrainState

LOOKED_AT = ("loss", "grad_norm", "skipped")


class Rerun(Hook):
    """Runs a suspicious step again, and takes the second result."""

    def wrap_step(self, run: Run, step_fn: StepFn) -> StepFn:
        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            new, first = step_fn(state, batch)
            # The step communicates, so all processes run it again or none does.
            if not agree("again" if suspicious(jax.device_get(first)) else None):
                return new, first
            new, second = step_fn(state, batch)
            _record(run, first, second)
            return new, second

        return step


def _record(run: Run, first: Metrics, second: Metrics) -> None:
    """Record the verdict on step `run.step`, given the metrics of both runs."""
    runs = [[np.asarray(metrics[name]) for name in LOOKED_AT] for metrics in (first, second)]
    same = all(a.tobytes() == b.tobytes() for a, b in zip(*runs, strict=True))
    if jax.process_index() == 0:
        seen = {name: [run[i].item() for run in runs] for i, name in enumerate(LOOKED_AT)}
        verdict = "persistent" if same else "transient"
        run.events.record(
            "rerun", step=run.step, verdict=verdict, batch_hash=run.batch_hash(), **seen
        )
