"""Find stragglers: compare the host time of all processes.

All processes finish a step together, so the time of a step does not show who delayed it. Host time does: the time that
a process does not wait for its devices, but for its batch, its disk or anything else on its host. Short host time
overlaps with the devices' work; a process with much more of it than the others delays them all. A slow device is not
seen here: every process waits the same for it.
"""

import socket
import statistics
import time

import jax
import numpy as np

from ultrascale_jax.hooks import Hook, Run
from ultrascale_jax.launch.multihost import gather

OUTLIER = 2.0
"""A straggler's own time is so many times the median of the others'..."""

SHARE = 0.1
"""... and this share of the step."""

LISTED = 16
"""Processes of which an event tells the times, the slowest first."""


def cadence(steps: int) -> int:
    """Steps between comparisons in a run of so many: 100, or half of a short run, but 20 at least."""
    return min(100, max(20, steps // 2))


class StragglerCheck(Hook):
    """Compares the times of this process's steps with the others' every so many."""

    def __init__(self, every: int):
        """Compare after each `every` steps."""
        self._every = every
        self.steps: list[float] = []
        self.own: list[float] = []
        """Seconds of the steps since the last comparison, and the process's own part of them."""

    def on_start(self, run: Run) -> None:
        self.on_resume(run)

    def on_resume(self, run: Run) -> None:
        self._begun, self._waited_s = time.monotonic(), run.device_wait_s

    def after_step(self, run: Run) -> None:
        took = time.monotonic() - self._begun
        self.steps.append(took)
        self.own.append(max(0.0, took - (run.device_wait_s - self._waited_s)))
        if run.every(self._every):
            if jax.process_count() > 1:
                self._compare(run)
            self.steps, self.own = [], []
        self.on_resume(run)

    def _compare(self, run: Run) -> None:
        mine = {"of": jax.process_index(), "of_host": socket.gethostname()}
        rows = gather(mine | summary(self.steps, self.own))
        if jax.process_index() != 0:
            return
        slow = stragglers([row["step_mean_s"] for row in rows], [row["own_mean_s"] for row in rows])
        slow_rows = [rows[rank] for rank in slow]
        rows.sort(key=lambda row: row["own_mean_s"], reverse=True)
        run.events.record("step_times", step=run.step, slowest=rows[:LISTED])
        for row in slow_rows:
            run.events.record("straggler", step=run.step, **row)
            run.note(
                f"straggler: rank {row['of']} on {row['of_host']} spends {row['own_mean_s']:.3f} s of a step of "
                f"{row['step_mean_s']:.3f} s on its own (p50 {row['own_p50_s']:.3f} s, p99 {row['own_p99_s']:.3f} s)"
            )


def stragglers(steps: list[float], host_times: list[float]) -> list[int]:
    """Return the ranks whose mean host time delays the others, given the mean times of steps and host by rank."""
    ranks = []
    for rank, (step_s, own_s) in enumerate(zip(steps, host_times, strict=True)):
        other_times = host_times[:rank] + host_times[rank + 1 :]
        if (
            other_times
            and own_s > OUTLIER * statistics.median(other_times)
            and own_s > SHARE * step_s
        ):
            ranks.append(rank)
    return ranks


def summary(steps: list[float], host_times: list[float]) -> dict[str, float]:
    """Return mean, p50 and p99 of both times in seconds, as `step_mean_s` and `own_p99_s`."""
    return {
        f"{name}_{kind}_s": float(value)
        for name, times in (("step", steps), ("own", host_times))
        for kind, value in (
            ("mean", np.mean(times)),
            *zip(("p50", "p99"), np.percentile(times, (50, 99)), strict=True),
        )
    }
