"""Inject faults into a run, to test that it survives them.

`injected(plan)` gives the hook that does it, for a run inside one process. `tests/faults/faulty.py` is a recipe whose
runs, under a supervisor or not, have the faults of the variable `FAULTS=kind@step@rank[,kind@step@rank...]`.

A fault happens once in the life of a run directory, however often the run restarts: the process writes it to
`run_dir/faults.txt` before it happens. The list of kinds follows NVRx's `Fault` and torchft's `EventInjector`.
"""

import contextlib
import dataclasses
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from ultrascale_jax.data.loader import Loader
from ultrascale_jax.hooks import Batch, Hook, Metrics, Run, StepFn
from ultrascale_jax.train_step.state import TrainState

VARIABLE = "FAULTS"

PROCESS_FAULTS = ("kill", "stop", "term", "exception", "sleep", "exit")
"""Kinds that concern a process, not its numbers."""

KINDS = (*PROCESS_FAULTS, "killsave", "nan", "spike", "flip", "loader", "stall")
"""`killsave`: SIGKILL while the checkpoint of that step is written; `nan`, `spike`: in the loss of the step; `flip`:
one bit of one replica of a parameter after the step; `loader`, `stall`: the batch of the step raises or is late."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}

SLEEP_S = 2.0
"""Duration of `sleep`, the straggler's."""

STALL_S = 3600.0
"""Duration of `stall`: for ever, as far as a test is concerned."""

FACTORS = {"nan": float("nan"), "spike": 20.0}
"""Factor of the last norm's scales for one step, by kind."""

BIT = 10
"""The bit of the mantissa that `flip` flips: a change of 1e-4 that no other check would see."""


@dataclass(frozen=True)
class Fault:
    """One fault of the plan."""

    kind: str
    step: int
    """The optimizer step before which it happens, from 1."""
    rank: int
    """The process that it concerns, or -1 for all."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}@{self.rank}"


def parse(text: str) -> list[Fault]:
    """Return the faults that the variable names."""
    parts = [re.fullmatch(r"(\w+)@(\d+)@(-1|\d+)", part) for part in text.split(",") if part]
    assert all(part is not None and part[1] in KINDS for part in parts), text
    return [Fault(part[1], int(part[2]), int(part[3])) for part in parts if part is not None]


class FaultPlan:
    """The faults that this process has before it."""

    def __init__(self, faults: Sequence[Fault], rank: int, run_dir: Path):
        self._faults = [fault for fault in faults if fault.rank in (rank, -1)]
        self._rank, self._record = rank, run_dir / "faults.txt"

    def due(self, kind: str, step: int) -> bool:
        """Return whether a fault of `kind` is due on this process at `step`; it is then taken off the plan for good."""
        return any(
            (fault.kind, fault.step) == (kind, step) and not self._is_done(fault)
            for fault in self._faults
        )

    def inject(self, step: int) -> None:
        """Do the process faults that are planned, before `step`."""
        for kind in PROCESS_FAULTS:
            if not self.due(kind, step):
                continue
            if kind in SIGNALS:
                os.kill(os.getpid(), SIGNALS[kind])
            elif kind == "sleep":
                time.sleep(SLEEP_S)
            elif kind == "exit":
                raise SystemExit(1)
            else:
                raise RuntimeError(f"fault on purpose before step {step} on rank {self._rank}")

    def inject_in_loader(self, step: int) -> None:
        """Inject the faults due to the batch of `step`, in the loader's thread that reads it."""
        if self.due("loader", step):
            raise OSError(errno.EIO, f"fault on purpose in the loader on rank {self._rank}")
        if self.due("stall", step):
            time.sleep(STALL_S)

    def _is_done(self, fault: Fault) -> bool:
        """Return whether `fault` happened on this rank before; if not, it is on record now."""
        line = f"{fault} on {self._rank}"
        done = self._record.read_text().splitlines() if self._record.exists() else []
        if line not in done:
            with open(self._record, "a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        return line in done


@contextlib.contextmanager
def injected(plan: FaultPlan) -> Iterator[Hook]:
    """Yield the hook that injects the faults of `plan`; inside the block the loader's faults are injected too."""
    load = Loader._load

    def faulty_load(self: Loader, step: int, rows: Sequence[int]):
        if self.split == "train":
            plan.inject_in_loader(step + 1)
        return load(self, step, rows)

    Loader._load = faulty_load
    try:
        yield FaultInjection(plan)
    finally:
        Loader._load = load


def install(environ: Mapping[str, str]) -> None:
    """Let the faults of the variable strike every run of this process."""
    from ultrascale_jax.training import loop

    train, faults = loop.train, parse(environ[VARIABLE])

    def faulty_train(cfg, mesh, **options):
        plan = FaultPlan(faults, jax.process_index(), Path(cfg.log.run_dir))
        with injected(plan) as hook:
            return train(cfg, mesh, hooks=[hook], **options)

    loop.train = faulty_train


class FaultInjection(Hook):
    """Injects the faults of a plan, except the loader's."""

    def __init__(self, plan: FaultPlan):
        self._plan = plan

    def on_start(self, run: Run) -> None:
        # Before the others, which are to see what is wrong; behind the profiler, which reads the compiled step.
        profiler, *others = run.hooks
        run.hooks = (profiler, self, *(hook for hook in others if hook is not self))

    def before_step(self, run: Run) -> None:
        self._plan.inject(run.step)

    def on_save(self, run: Run) -> None:
        if self._plan.due("killsave", run.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap_step(self, run: Run, step_fn: StepFn) -> StepFn:
        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            kinds = [kind for kind in FACTORS if self._plan.due(kind, run.step)]
            if kinds:
                new, metrics = _step_with_wrong_norm(step_fn, FACTORS[kinds[0]], state, batch)
            else:
                new, metrics = step_fn(state, batch)
            return (flipped(new) if self._plan.due("flip", run.step) else new), metrics

        return step


def _step_with_wrong_norm(
    step_fn: StepFn, factor: float, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Run the step with the last norm's scales multiplied, and restore the scales."""
    sound = state.params.final_norm[...]
    wrong = _of_pieces(sound, lambda piece, _: piece * np.float32(factor))
    new, metrics = step_fn(_with_norm(state, wrong), batch)
    return _with_norm(new, sound), metrics


def flipped(state: TrainState) -> TrainState:
    """Return `state` with one bit of the last norm flipped on this process's first device alone."""
    device = jax.local_devices()[0]

    def flip(piece: np.ndarray, on: jax.Device) -> np.ndarray:
        bits = piece.copy().view(np.uint32)
        bits.reshape(-1)[0] ^= (1 << BIT) * (on == device)
        return bits.view(np.float32)

    return _with_norm(state, _of_pieces(state.params.final_norm[...], flip))


def _of_pieces(array: jax.Array, fn: Callable[[np.ndarray, jax.Device], np.ndarray]) -> jax.Array:
    """Apply `fn(piece, device)` to the pieces of `array` on this process's devices."""
    pieces = [
        jax.device_put(fn(np.asarray(shard.data), shard.device), shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _with_norm(state: TrainState, norm: jax.Array) -> TrainState:
    old = state.params.final_norm[...]
    params = jax.tree.map(lambda leaf: norm if leaf is old else leaf, state.params)
    return dataclasses.replace(state, params=params)
