"""Save and restore a run's checkpoints. Only this file, `restoring.py` and `load_params.py` call Orbax.

A checkpoint of step n is the folder n, with the arrays of `params` and `train` (optimizer state and counters). The JSON
in `_CHECKPOINT_METADATA` has the run's config, its place in the data, the library versions, and the fingerprint of each
array. Orbax writes the checkpoint in the background; one rename makes it visible when it is complete, and then process
0 writes its manifest. Any mesh restores it straight into its shardings: layers lie as the model runs them, whatever the
pipeline. Array names are attribute paths (`params/blocks/attn/w_q`), so they outlive a change of library.

A checkpoint that has changed since it was saved is renamed `n.corrupt`, and the one before it is used. With
`checkpoint.store` a copy of each goes to object storage, which is read where the disk has none (`copies.py`).
"""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from ultrascale_jax.checkpoint import restoring, saving
from ultrascale_jax.checkpoint.branch import branch_point, bring_metrics
from ultrascale_jax.checkpoint.copies import FETCHING, Copies
from ultrascale_jax.checkpoint.layout import Groups, join, split
from ultrascale_jax.checkpoint.manifest import Damaged
from ultrascale_jax.checkpoint.restoring import found_by_process0, on_all
from ultrascale_jax.checkpoint.run_metadata import check_model, config_from_dict
from ultrascale_jax.checkpoint.step_dirs import (
    check_path,
    metadata,
    quarantine,
    quarantined,
    remove,
    steps,
    with_digest,
)
from ultrascale_jax.checkpoint.uploads import Uploads
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.exit_codes import CRASHED, STOPPED
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.launch.run_files import CHECKPOINTS, METRICS, folder_of
from ultrascale_jax.launch.run_lock import LASTING, refusal
from ultrascale_jax.storage.remote import RemoteError
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
        before_save: Callable[[], None] = lambda: None,
        *,
        stall_s: float = saving.STALL_S,
    ):
        """Open the folder. With `checkpoint.resume=never` an earlier run's checkpoints are first moved aside.

        `before_save` may refuse a save, on all processes, by raising. Raises `UserError` if the folder cannot be
        written, or with `checkpoint.resume=must` is empty.
        """
        self.folder, self._cfg = checkpoint_folder(cfg), cfg
        self._events, self._stall_s = events, stall_s
        self._before_save = before_save
        self._copies = Copies(cfg.checkpoint.store) if cfg.checkpoint.store else None
        self._uploads = None if self._copies is None else Uploads(self._copies, cfg, events)
        self._fetched: set[int] = set()
        """Steps on the disk that came from their copies."""
        self._saving: saving.Writing | None = None
        self._begun: int | None = None
        """Step of the save under way, which all processes know alike: one may be stuck while others are done."""
        self._in_a_row = self.failures = 0
        self._probe = saving.Probe(self.folder)
        copied, copies_aside = self._copied()
        if cfg.checkpoint.resume == "never":
            fix = f"holds checkpoints {copied} of an earlier run; remove them, or choose another place"
            require(not copied, "checkpoint.store", cfg.checkpoint.store, fix)
        self._prepare()
        restoring.quieten_orbax()
        # A private part of Orbax; where another version has none, saves cost memory and work all the same.
        with contextlib.suppress(ImportError, AttributeError):
            saving.spare_memory()
        self._rotation: Any = _Rotation(cfg.checkpoint.keep)
        fix = f"there is no checkpoint in {self.folder}; use checkpoint.resume=auto to start anew"
        found, aside = self._listed()
        empty = not (found or aside or copied or copies_aside)
        require(cfg.checkpoint.resume != "must" or not empty, "checkpoint.resume", "must", fix)
        self._opened = None if found or copied else self._open()

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

    def _copied(self) -> tuple[list[int], list[str]]:
        """Return the steps that have a copy, and names put aside there, as process 0 sees them."""
        if self._copies is None:
            return [], []
        steps, aside = found_by_process0(self._copies.steps)
        return steps, aside

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
        # Orbax deletes before the new checkpoint is proven, and an old one that cannot be deleted fails the save.
        opened._manager._checkpoint_deleter = self._rotation
        return opened

    @property
    def _orbax(self) -> ocp.training.Checkpointer:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        """Wait for the save under way; report an error now, so that it hides no exception.

        Copies are waited for unless there is one: the next start makes those that are missing.
        """
        problem = self._finish()
        if problem is not None:
            self._in_a_row += 1
            self._tell(self._begun, problem)
        if self._uploads is not None:
            waits = kind is None
            while waits and not self._uploads.wait(saving.TOLD_S):
                waits = not self._uploads.is_stuck(self._stall_s)
            self._uploads.close()
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
        self._check_copies()
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
        if self._uploads is not None:
            uploads = self._uploads
            self._rotation.held = found_by_process0(lambda: uploads.pending)
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
        self._begun = step
        place, rotate = self.folder / str(step), self._rotation.on
        self._saving = saving.Writing(
            place, wait, self._events, sealed=lambda place: self._sealed(place, rotate=rotate)
        )

    def _sealed(self, place: Path, *, rotate: bool) -> None:
        if rotate:
            self._rotation.delete_old(self.folder)
        self._copy(place, rotate=rotate)

    def _copy(self, place: Path, *, rotate: bool) -> None:
        if self._uploads is not None:
            self._uploads.add(place, rotate=rotate)

    def _check_copies(self, *, must: bool = False) -> None:
        """Raise `SaveFailed` where `MOST_FAILURES` copies in a row have failed, or the last one `must` not."""
        if self._uploads is None:
            return
        most = 1 if must else MOST_FAILURES
        problem = agree(self._uploads.problem if self._uploads.failed_in_a_row >= most else None)
        if problem is not None:
            what = "the last copy" if must else f"copies ({MOST_FAILURES} in a row)"
            where = self._cfg.checkpoint.store
            fix = f"Mend {where}; the same command makes the copy that is missing"
            raise SaveFailed(f"{what} failed: {problem}. {fix}")

    def wait_for_copies(self, seconds: float = saving.TOLD_S) -> bool:
        """Wait at most so long until all copies are made; return whether they are.

        Raises `SaveFailed` if the last one failed, or makes no progress.
        """
        if self._uploads is None:
            return True
        done = self._uploads.wait(seconds)
        if agree("stuck" if self._uploads.is_stuck(self._stall_s) else None) is not None:
            where = self._cfg.checkpoint.store
            raise SaveFailed(f"a copy to {where} makes no progress; the same command makes it")
        self._check_copies(must=True)
        return agree(None if done else "not yet") is None

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
        self, abstract: TrainState, accept: Callable[[dict, object], list[str]]
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

        copied = self._copied()[0]
        both = sorted({*self._listed()[0], *copied})
        take = functools.partial(self._restored, copied=copied, accept=accept, restore=restore)
        found = restoring.newest(both, take, self._put_aside)
        if found is not None:
            step, (state, notes) = found
            if step > max(copied, default=-1) and jax.process_index() == 0:
                self._copy(self.folder / str(step), rotate=True)
            for other in self._listed()[0]:
                place = self.folder / str(other)
                fault = agree(restoring.fault_of_older(place))
                if fault is not None and agree(restoring.fault_of_older(place)) is not None:
                    self._put_aside(other, fault)
            return state, step, notes
        aside = self._listed()[1] + [
            f"{self._cfg.checkpoint.store}/{name}" for name in self._copied()[1]
        ]
        if aside:
            raise NothingLeft(
                f"all checkpoints in {self.folder} are damaged ({', '.join(aside)}): put a good one back under its "
                "number, or start anew with checkpoint.resume=never"
            )
        return self._branch(restore)

    def _restored(
        self,
        step: int,
        *,
        copied: Sequence[int],
        accept: Callable[[dict, object], list[str]],
        restore: Callable[[Path], tuple[TrainState, list[str]]],
    ) -> tuple[TrainState, list[str]]:
        """Restore a step from the disk, or where that has none, or a damaged one, from its copy."""
        place = self.folder / str(step)
        if step in self._listed()[0]:
            try:
                return restore(place)
            except Damaged as error:
                if step not in copied:
                    raise
                self._put_aside(step, str(error))
        self._fetch(step, accept)
        with contextlib.suppress(Damaged):
            return restore(place)
        # The copy is damaged, or was on its way: once more from the beginning.
        self._fetch(step, accept)
        return restore(place)

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

    def _fetch(self, step: int, accept: Callable[[dict, object], list[str]]) -> None:
        """Fetch the copy of `step` to the disk, all processes a part, unless `accept` refuses its metadata.

        Raises `Damaged` where it is not what its manifest says, by names and sizes; `opened` checks the contents.
        """
        copies, place = self._copies, self.folder / FETCHING / str(step)
        assert copies is not None
        accept(
            found_by_process0(lambda: metadata(copies.fetch_metadata(step, self.folder))),
            f"{copies.url}/{step}",
        )

        def plan() -> tuple[str, dict[str, int]]:
            content, sizes = copies.manifest(step)
            copies.require_room(self.folder, sizes)
            total = sum(sizes.values()) / 1e9
            say(f"fetching the checkpoint of step {step} ({total:.3f} GB) from {copies.url}")
            return content.decode(), sizes

        content, sizes = found_by_process0(plan)
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
        own = names[jax.process_index() :: jax.process_count()]
        on_all(lambda: copies.fetch(step, place, own))
        found_by_process0(lambda: copies.complete(place, content.encode()))
        self._fetched.add(step)

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
        """Rename a damaged checkpoint: the one on the disk, or the copy if it came from there."""
        if jax.process_index() == 0:
            place, name = str(self.folder / str(step)), "nothing"
            try:
                if self._copies is not None and self._is_copy(step):
                    shutil.rmtree(place, ignore_errors=True)
                    place = f"{self._copies.url}/{step}"
                    name = self._copies.put_aside(step)
                else:
                    name = quarantine(Path(place)).name
            except RemoteError as error:
                say(f"{place} cannot be put aside: {error}")
            say(f"DAMAGED CHECKPOINT: {why}, in {place}; put aside as {name}")
            if self._events is not None:
                self._events.record("quarantined", step=step, why=why, name=name)
        self._fetched.discard(step)
        agree(None)  # nobody looks at the folder before it is renamed
        if self._opened is not None:
            self._opened.reload()

    def _is_copy(self, step: int) -> bool:
        """Return whether the checkpoint that was tried last came, or would have come, from object storage."""
        return step in self._fetched or not (self.folder / str(step)).exists()


class _Rotation:
    """Tells Orbax after each save which checkpoints to preserve: the newest `keep`, or all while it is not `on`.

    It also stands in the place of Orbax's deleter, and deletes when the new checkpoint has its manifest.
    """

    def __init__(self, keep: int):
        self._keep, self.on = keep, True
        self.held: Sequence[int] = ()
        """Steps that are being copied, which stay too."""
        self._old: list[int] = []

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Note what Orbax wants to delete."""
        self._old += steps

    def close(self) -> None:
        """Do nothing, as Orbax's deleter."""

    def delete_old(self, folder: Path) -> None:
        """Delete what was noted; what cannot be deleted is told, and the next start tries again."""
        old, self._old = self._old, []
        for step in old:
            try:
                remove(folder / str(step))
            except OSError as error:
                say(f"warning: the old checkpoint {folder / str(step)} cannot be deleted: {error}")

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        oldest = len(checkpoints) - self._keep if self.on else 0
        return [
            number >= oldest or checkpoint.step in self.held
            for number, checkpoint in enumerate(checkpoints)
        ]


def fits(abstract: TrainState, meta: dict) -> bool:
    """Return whether the arrays that the metadata of a checkpoint lists are those of `abstract`."""
    return not restoring.misfits(restoring.entries(meta), _shapes(abstract, meta)[1])


def _shapes(abstract: TrainState, meta: dict) -> tuple[TrainState, Groups]:
    """Return the state to load from a checkpoint with this metadata, and the arrays to read for it."""
    like = saved_shapes(abstract, config_from_dict(meta["config"]))
    return like, split(checkpoint_layout_shapes(like, abstract.params.layer_order_of))


def checkpoint_folder(cfg: Config) -> Path:
    """Return the checkpoint folder of `cfg`, to which a run may write.

    Raises `NotRegular` for a link, because a run renames and deletes there, and `UserError` as `check_path`.
    """
    check_path("log.run_dir", cfg.log.run_dir)
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
