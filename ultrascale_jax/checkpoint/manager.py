"""Save and restore a run's checkpoints. Only this file, `restoring.py` and `load_params.py` call Orbax.

A checkpoint of step n is the folder n, with the arrays of `params` and `train` (optimizer state and counters). The JSON
in `_CHECKPOINT_METADATA` has the run's config, its place in the data, the library versions, and the fingerprint of each
array. Orbax writes the checkpoint in the background; one rename makes it visible when it is complete, and then process
0 writes its manifest. Any mesh restores it straight into its shardings: layers lie as the model runs them, whatever the
pipeline. Array names are attribute paths (`params/blocks/attn/w_q`), so they outlive a change of library.

A checkpoint that has changed since it was saved is renamed `n.corrupt`, and the one before it is used.
"""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from ultrascale_jax.checkpoint import restoring, saving
from ultrascale_jax.checkpoint.branch import branch_point, bring_metrics
from ultrascale_jax.checkpoint.layout import Groups, join, split, with_retired
from ultrascale_jax.checkpoint.restoring import found_by_process0
from ultrascale_jax.checkpoint.run_metadata import check_model, config_from_dict
from ultrascale_jax.checkpoint.step_dirs import (
    metadata,
    quarantine,
    quarantined,
    steps,
    with_digest,
)
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.exit_codes import CRASHED, STOPPED
from ultrascale_jax.launch.faults import FaultPlan
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.launch.run_files import CHECKPOINTS, METRICS, folder_of
from ultrascale_jax.launch.run_lock import LASTING, refusal
from ultrascale_jax.train_step.state import (
    TrainState,
    checkpoint_layout_shapes,
    from_checkpoint_layout,
    reset_optional_state,
    saved_shapes,
    to_checkpoint_layout,
)

MOST_FAILURES = 3
"""Saves in a row that may fail before a run ends."""


class SaveFailed(UserError):
    """The last save of a run, or `MOST_FAILURES` in a row, failed; a restart may help."""

    exit_code = CRASHED


class NothingLeft(UserError):
    """All checkpoints of the run are damaged."""

    exit_code = STOPPED


class Checkpoints:
    """The checkpoints of one run, in `run_dir/checkpoints`; every process calls every method."""

    def __init__(
        self,
        cfg: Config,
        events: Events | None = None,
        faults: FaultPlan | None = None,
        before_save: Callable[[], None] = lambda: None,
        *,
        stall_s: float = saving.STALL_S,
    ):
        """Open the folder. With `checkpoint.resume=never` an earlier run's checkpoints are first moved aside.

        `before_save` may refuse a save, on all processes, by raising. Raises `UserError` if the folder cannot be
        written, or with `checkpoint.resume=must` is empty.
        """
        self.folder, self._cfg = checkpoint_folder(cfg), cfg
        self._events, self._faults, self._stall_s = events, faults or FaultPlan.none(), stall_s
        self._before_save = before_save
        self._saving: saving.Writing | None = None
        self._begun: int | None = None
        """Step of the save under way, which all processes know alike: one may be stuck while others are done."""
        self._in_a_row = self.failures = 0
        self._probe = saving.Probe(self.folder)
        self._prepare()
        saving.quieten_orbax()
        self._rotation: Any = _Rotation(cfg.checkpoint.keep)
        fix = f"there is no checkpoint in {self.folder}; use checkpoint.resume=auto to start anew"
        found, aside = self._listed()
        empty = not found and not aside
        require(cfg.checkpoint.resume != "must" or not empty, "checkpoint.resume", "must", fix)
        self._opened = None if found else self._open()

    def _prepare(self) -> None:
        problem, lasting = None, False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._cfg.checkpoint.resume == "never" and jax.process_index() == 0:
                saving.move_aside(self.folder)
                saving.move_aside(Path(self._cfg.log.run_dir) / METRICS)
                self.folder.mkdir(exist_ok=True)
                if self._events is not None:
                    self._events.record("anew")
            if jax.process_index() == 0:
                saving.sweep(self.folder)
        except OSError as error:
            problem = f"cannot write in {self.folder} ({error.strerror})"
            lasting = error.errno in LASTING
        problem = agree(problem)
        if problem is None:
            problem = self._probe()
            lasting, problem = problem is not None and self._probe.lasting, agree(problem)
        lasting = agree("lasting" if lasting else None) is not None
        if problem is not None:
            fix = "mount it, make room or make it writable; or choose another log.run_dir"
            raise refusal(
                f"log.run_dir={self._cfg.log.run_dir!r}: {problem}; {fix}",
                lasting=lasting,
            )
        self._listed()

    def _listed(self) -> tuple[list[int], list[str]]:
        """Return steps, and names put aside, as process 0 sees them: on NFS other hosts may see an old listing."""
        found, aside = found_by_process0(lambda: (steps(self.folder), quarantined(self.folder)))
        return found, aside

    def _open(self) -> ocp.training.Checkpointer:
        """Open Orbax, on all processes together.

        It reads the metadata of all steps, and raises for one that it cannot parse, so with steps in the folder it is
        opened after `resume` has put damaged ones aside.
        """
        # The policies' type hints do not fit the class that takes them (Orbax 0.12).
        policies: Any = ocp.training
        opened: Any = ocp.training.Checkpointer(
            str(self.folder),
            context=_context(),
            save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=self._rotation,
            cleanup_tmp_directories=False,  # `saving.sweep` has removed them
        )
        # Only `StopRequest` asks JAX for a request to stop. Orbax asks as well, in a save and in the thread
        # that ends one, with the number of its step; JAX takes the last number for how far the process is, and would
        # choose a point to stop at that lies behind it.
        opened._manager.reached_preemption = lambda step: False
        return opened

    @property
    def _orbax(self) -> ocp.training.Checkpointer:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        """Wait for the save under way; report an error now, so that it hides no exception."""
        problem = self._finish()
        if problem is not None:
            self._in_a_row += 1
            self._tell(self._begun, problem)
        if self._saving is not None:
            saving.leave_in_time()
        elif self._opened is not None:
            self._opened.close()

    @property
    def latest(self) -> int | None:
        """Return the newest complete step, or None."""
        if self._opened is None:
            return max(steps(self.folder), default=None)
        return None if self._opened.latest is None else self._opened.latest.step

    def save(
        self, state: TrainState, meta: dict, *, wait: bool = False, rotate: bool = True
    ) -> None:
        """Write `state` as a checkpoint of `meta["data"]["step"]`, in the background unless `wait`.

        Afterwards the newest `checkpoint.keep` are left, or all if not `rotate`.
        The next call reports a save that failed (a full disk, say); the run goes on until `MOST_FAILURES`
        in a row have failed. With `wait` a failure is raised at once. Raises `SaveFailed`.
        """
        step, _ = meta["data"]["step"], self._orbax
        self._before_save()
        if self._settle():
            # Orbax writes one at a time, and that one may never end.
            if wait:
                self._count(step, f"the one before it {saving.STALLED}", must=True)
            return
        if found_by_process0(lambda: self.latest == step):
            return
        problem = agree(self._probe())
        if problem is not None:
            self._count(step, problem, must=wait)
            return
        self._rotation.on = rotate
        self._begin(step, state, meta)
        if wait:
            self._settle(must=True)

    def _begin(self, step: int, state: TrainState, meta: dict) -> None:
        state = dataclasses.replace(state, frozen=None)
        groups = split(to_checkpoint_layout(state, state.params.layer_order_of))
        model = type(state.params).__qualname__
        meta = with_digest(meta | {"arrays": restoring.record(groups), "model": model})
        try:
            response = self._orbax.save_checkpointables_async(
                step, groups, force=True, custom_metadata=meta
            )
            wait = response.result if response is not None else lambda: None
        except Exception as error:  # Orbax raises whatever the file system does.
            wait = _raising(error)
        if self._faults.due("killsave", step):
            os.kill(os.getpid(), signal.SIGKILL)
        self._begun = step
        self._saving = saving.Writing(self.folder / str(step), wait, self._events)

    def _settle(self, *, must: bool = False) -> bool:
        """Note, on all processes alike, how the save under way ended; return whether it is still under way."""
        if self._begun is None:
            return False
        step, problem = self._begun, agree(self._finish())
        stuck = agree(None if self._saving is None else saving.STALLED) is not None
        if not stuck:
            self._begun = None
        self._count(step, problem, must=must)
        return stuck

    def _finish(self) -> str | None:
        """Return the error of the save under way; unless it is stuck, it is over afterwards."""
        if self._saving is None:
            return None
        problem = self._saving.result(self._stall_s)
        if self._saving.alive:
            return problem
        self._saving = None
        if problem is not None:
            # Orbax reports a failed save twice, and would refuse the next one for it.
            with contextlib.suppress(Exception):
                self._orbax.wait()
        return problem

    def _count(self, step: int, problem: str | None, *, must: bool) -> None:
        """Note how the save of `step` ended. Raises `SaveFailed` if it must not fail, or too many have."""
        if problem is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._tell(step, problem)
        if must or self._in_a_row >= MOST_FAILURES:
            why = "the last of this run" if must else f"{MOST_FAILURES} in a row"
            newest = self.latest
            begin = "begins anew, as there is no checkpoint yet"
            goes_on = begin if newest is None else f"goes on from the newest, of step {newest}"
            raise SaveFailed(
                f"checkpoint of step {step} failed ({why}): {problem}. Mend {self.folder}; the same command {goes_on}"
            )

    def _tell(self, step: int | None, problem: str) -> None:
        self.failures += 1
        if self._events is not None:
            self._events.record("save_failed", step=step, problem=problem, in_a_row=self._in_a_row)
        if jax.process_index() == 0:
            where = f"({self._in_a_row} of {MOST_FAILURES} in a row)"
            say(f"checkpoint of step {step} failed {where}: {problem}")

    def resume(
        self, abstract: TrainState, accept: Callable[[dict, Path], list[str]]
    ) -> tuple[TrainState, int, list[str]] | None:
        """The newest state that is what was saved, its step, and what to tell of it; none if nothing was ever saved.

        Where nothing was, `checkpoint.resume` may name another run's checkpoint, and its metrics come along. Damaged
        checkpoints are put aside. `accept(metadata, place)` raises `UserError` for another run's checkpoint, and
        returns what is worth a line. Raises `NothingLeft` if there are checkpoints and all are damaged, and
        `Unreadable` if it cannot tell.
        """

        def restore(place: Path) -> tuple[TrainState, list[str]]:
            meta, note = restoring.opened(place)
            notes = [f"resumed from {place}", *([] if note is None else [f"warning: {note}"])]
            notes += [f"changed since: {change}" for change in accept(meta, place)]
            return self._load(place, abstract, meta), notes

        found = restoring.newest(
            self._listed()[0], lambda step: restore(self.folder / str(step)), self._put_aside
        )
        if found is not None:
            step, (state, notes) = found
            for other in self._listed()[0]:
                place = self.folder / str(other)
                fault = agree(restoring.unparsable(place))
                if fault is not None and agree(restoring.unparsable(place)) is not None:
                    self._put_aside(other, fault)
            return state, step, notes
        aside = self._listed()[1]
        if aside:
            raise NothingLeft(
                f"all checkpoints in {self.folder} are damaged ({', '.join(aside)}): put a good one back under its "
                "number, or start anew with checkpoint.resume=never"
            )
        return self._branch(restore)

    def _branch(
        self, restore: Callable[[Path], tuple[TrainState, list[str]]]
    ) -> tuple[TrainState, int, list[str]] | None:
        """Restore what `checkpoint.resume` names of another run, which is only read."""
        point = branch_point(self._cfg.checkpoint.resume)
        if point is None:
            return None

        def damaged(step: int, why: str) -> None:
            fix = f"step {step} is damaged ({why}); name another step"
            require(False, "checkpoint.resume", self._cfg.checkpoint.resume, fix)

        found = restoring.newest([int(point.name)], lambda _: restore(point), damaged)
        assert found is not None
        bring_metrics(point, Path(self._cfg.log.run_dir))
        step, (state, notes) = found
        return state, step, notes

    def meta(self, step: int) -> dict:
        """Return the JSON part of a checkpoint: `config`, `data`, `versions`, and `arrays` unless it is old."""
        return metadata(self.folder / str(step))

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Restore the state of `step`, bit for bit, in the shapes, types and shardings of `abstract`; see `_load`."""
        place = self.folder / str(step)
        return self._load(place, abstract, restoring.opened(place)[0])

    def _load(self, place: Path, abstract: TrainState, meta: dict) -> TrainState:
        """As `restore`.

        What a run carries because of its config (the loss scale of float16, the window of spikes) begins anew where the
        checkpoint holds none that fits, and is dropped where the run wants none. Raises `Damaged`.
        """
        check_model(meta, type(abstract.params), place)
        like, shapes = _shapes(abstract, meta)
        groups = restoring.load(place, meta, shapes)
        order = abstract.params.layer_order_of
        state = restoring.cast(from_checkpoint_layout(join(groups, like), like, order), like)
        return reset_optional_state(state, abstract, self._cfg)

    def _put_aside(self, step: int, why: str) -> None:
        aside = self.folder / f"{step}.corrupt"
        if jax.process_index() == 0:
            aside = quarantine(self.folder / str(step))
            say(
                f"DAMAGED CHECKPOINT: {why}, in {self.folder / str(step)}; put aside as {aside.name}"
            )
            if self._events is not None:
                self._events.record("quarantined", step=step, why=why, name=aside.name)
        agree(None)  # nobody looks at the folder before it is renamed
        if self._opened is not None:
            self._opened.reload()


class _Rotation:
    """Tells Orbax after each save which checkpoints to preserve: the newest `keep`, or all while it is not `on`."""

    def __init__(self, keep: int):
        self._keep, self.on = keep, True

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        oldest = len(checkpoints) - self._keep if self.on else 0
        return [number >= oldest for number in range(len(checkpoints))]


def fits(abstract: TrainState, meta: dict) -> bool:
    """Whether the arrays that the metadata of a checkpoint lists, if it does, are those of `abstract`."""
    known = restoring.entries(meta)
    return known is None or not restoring.misfits(
        known, with_retired(_shapes(abstract, meta)[1], known)
    )


def _shapes(abstract: TrainState, meta: dict) -> tuple[TrainState, Groups]:
    """Return the state to load from a checkpoint with this metadata, and the arrays to read for it."""
    like = saved_shapes(abstract, config_from_dict(meta["config"]))
    return like, split(checkpoint_layout_shapes(like, abstract.params.layer_order_of))


def checkpoint_folder(cfg: Config) -> Path:
    """Return the checkpoint folder of `cfg`. Raises `NotRegular` for a link: a run renames and deletes there."""
    return folder_of(Path(cfg.log.run_dir).resolve(), CHECKPOINTS, make=False)


def _context() -> Any:
    context = ocp.Context()
    # Made in the background, a folder that cannot be made leaves Orbax's threads waiting for it for minutes.
    context.async_options.create_directories_asynchronously = False
    return context


def _raising(error: Exception) -> Callable[[], None]:
    def wait():
        raise error

    return wait
