"""Save and restore a run's checkpoints. Only this file, `restoring.py` and `load_params.py` call Orbax.

A checkpoint of step n is the folder n, with the arrays of `params` and `train` (optimizer state and counters). The JSON
in `_CHECKPOINT_METADATA` has the run's config, its place in the data, the library versions, and the fingerprint of each
array. Orbax writes the checkpoint in the background; one rename publishes it when it is complete. Any mesh restores
it straight into its shardings: layers are stored in the order of the model, whatever the pipeline. Array names are
attribute paths (`params/blocks/attn/w_q`), so they outlive a change of library.

A checkpoint that does not restore with its fingerprints is skipped, and renamed `n.corrupt` once an older one restores.
With `checkpoint.store` a copy of each goes to object storage, which is read where the disk has none (`copies.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ultrascale_jax import quiet_imports
from ultrascale_jax.checkpoint import restoring, saving
from ultrascale_jax.checkpoint.branch import branch_point, bring_metrics
from ultrascale_jax.checkpoint.copies import Copies, Uploads, announce_fetch, complete
from ultrascale_jax.checkpoint.layout import Groups, join, split
from ultrascale_jax.checkpoint.mesh_independent import (
    checkpoint_layout_shapes,
    from_checkpoint_layout,
    reset_optional_state,
    saved_shapes,
    to_checkpoint_layout,
)
from ultrascale_jax.checkpoint.run_metadata import check_model, config_from_dict
from ultrascale_jax.checkpoint.step_dirs import (
    check_path,
    metadata,
    quarantine,
    remove,
    steps,
    with_digest,
)
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.failures import Damaged, NotNow
from ultrascale_jax.launch.multihost import agree, on_all, on_process0
from ultrascale_jax.launch.run_files import METRICS, checkpoints_of
from ultrascale_jax.launch.run_lock import refusal
from ultrascale_jax.train_step.state import TrainState

MOST_FAILURES = 3
"""Saves in a row that may fail before a run ends."""

type Accept = Callable[[dict, object], list[str]]
"""Takes the metadata of a checkpoint and its place; returns lines for the user, raises `UserError` for another run."""


class Checkpoints:
    """The checkpoints of one run, in `run_dir/checkpoints`; every process calls every method."""

    def __init__(self, cfg: Config, *, stall_s: float = saving.STALL_S):
        """Open the folder. With `checkpoint.resume=never` an earlier run's checkpoints are first moved away.

        Raises `UserError` if the folder cannot be written, or with `checkpoint.resume=must` is empty.
        """
        self.folder, self._cfg = checkpoint_folder(cfg), cfg
        self._events = Events(Path(cfg.log.run_dir), jax.process_index())
        self._stall_s = stall_s
        self._copies = Copies(cfg.checkpoint.store) if cfg.checkpoint.store else None
        self._uploads = None if self._copies is None else Uploads(self._copies, cfg, self._events)
        self._saving: saving.Writing | None = None
        self._begun: int | None = None
        """Step of the save under way, equal on all processes: one may be stuck while others are done."""
        self._in_a_row = self.failures = 0
        self._probe = saving.Probe(self.folder)
        copied = self._copied()
        if cfg.checkpoint.resume == "never":
            fix = f"holds checkpoints {copied} of an earlier run; remove them, or choose another place"
            require(not copied, "checkpoint.store", cfg.checkpoint.store, fix)
        on_all(self._prepare)
        # After all have prepared: process 0 removes every process's files of earlier probes.
        on_all(self._check_disk)
        restoring.quieten_orbax()
        has_checkpoint = bool(self._listed() or copied)
        fix = f"there is no checkpoint in {self.folder}; use checkpoint.resume=auto to start anew"
        require(cfg.checkpoint.resume != "must" or has_checkpoint, "checkpoint.resume", "must", fix)

    def _prepare(self) -> None:
        """Create the folder, and clear it of leftovers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._cfg.checkpoint.resume == "never" and jax.process_index() == 0:
            saving.move_aside(self.folder)
            saving.move_aside(Path(self._cfg.log.run_dir) / METRICS)
            self.folder.mkdir(exist_ok=True)
            self._events.record("anew")
        if jax.process_index() == 0:
            saving.sweep(self.folder)

    def _check_disk(self) -> None:
        """Look whether the folder can be written."""
        if (problem := self._probe()) is not None:
            fix = "mount it, make room or make it writable; or choose another log.run_dir"
            raise refusal(f"log.run_dir={self._cfg.log.run_dir!r}: {problem}; {fix}")

    def _listed(self) -> list[int]:
        """Return the steps on the disk as process 0 sees them: on NFS other hosts may see an old listing."""
        return on_process0(lambda: steps(self.folder))

    def _copied(self) -> list[int]:
        """Return the steps that have a copy, as process 0 sees them."""
        return [] if self._copies is None else on_process0(self._copies.steps)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        """Wait for the save under way; report an error now, so that it hides no exception.

        Waits for the copies unless there is one: the next start uploads the missing copies.
        """
        problem = self._finish()
        if problem is not None:
            self._in_a_row += 1
            self._tell(self._begun, problem)
        if self._uploads is not None:
            self._uploads.wait(self._stall_s if kind is None else 0.0)
            self._uploads.close()
        if self._saving is not None:
            saving.leave_in_time()

    @property
    def latest(self) -> int | None:
        """Return the newest complete step that this process sees, or None."""
        return max(steps(self.folder), default=None)

    def save(
        self, state: TrainState, meta: dict, *, wait: bool = False, rotate: bool = True
    ) -> None:
        """Write `state` as a checkpoint of `meta["data"]["step"]`, in the background unless `wait`.

        Afterwards the newest `checkpoint.keep` are left, or all if not `rotate`.
        The next call reports a save that failed (a full disk, say); the run continues until `MOST_FAILURES`
        in a row have failed. With `wait` a failure is raised at once. Raises `NotNow`.
        """
        step = meta["data"]["step"]
        if (uploads := self._uploads) is not None:
            on_process0(lambda: uploads.check(MOST_FAILURES))
        if self._settle():
            # Orbax writes one at a time, and that one may never end.
            if wait:
                self._count(step, f"the one before it {saving.STALLED}", must=True)
            return
        problem = agree(self._probe())
        if problem is not None:
            self._count(step, problem, must=wait)
            return
        if step in self._listed():
            return
        self._begin(step, state, meta, rotate)
        if wait:
            self._settle(must=True)

    def _begin(self, step: int, state: TrainState, meta: dict, rotate: bool) -> None:
        groups = split(to_checkpoint_layout(state.without_frozen()))
        model = type(state.params).__qualname__
        meta = with_digest(meta | {"arrays": restoring.record(groups), "model": model})
        place = self.folder / str(step)
        try:
            with _context():
                response = quiet_imports.ocp.save_checkpointables_async(
                    str(place), groups, custom_metadata=meta
                )
            wait = response.result
        except Exception as error:  # Orbax raises whatever the file system does.
            wait = _raising(error)
        self._begun = step
        self._saving = saving.Writing(
            place, wait, self._events, lambda: self._completed(place, rotate)
        )

    def _completed(self, place: Path, rotate: bool) -> None:
        """Delete old checkpoints and begin the copy of the new one, on process 0; the save is over."""
        pending = [] if self._uploads is None else self._uploads.pending
        old = steps(self.folder)[: -self._cfg.checkpoint.keep] if rotate else []
        for step in set(old).difference(pending):
            try:
                remove(self.folder / str(step))
            except OSError as error:
                say(f"warning: the old checkpoint {self.folder / str(step)} stays: {error}")
        if self._uploads is not None:
            self._uploads.add(place, rotate=rotate)

    def wait_for_copies(self, seconds: float = saving.TOLD_S) -> bool:
        """Wait at most so long until all copies are made; return whether they are.

        Raises `NotNow` if the last copy failed, or is stuck.
        """
        if (uploads := self._uploads) is None:
            return True
        return on_process0(lambda: uploads.finish(seconds, self._stall_s))

    def _settle(self, *, must: bool = False) -> bool:
        """Note, on all processes, how the save under way ended; return whether it is still under way."""
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
        if not self._saving.alive:
            self._saving = None
        return problem

    def _count(self, step: int, problem: str | None, *, must: bool) -> None:
        """Note how the save of `step` ended. Raises `NotNow` if it must not fail, or too many have."""
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
            raise NotNow(
                f"checkpoint of step {step} failed ({why}): {problem}. Mend {self.folder}; the same command {goes_on}"
            )

    def _tell(self, step: int | None, problem: str) -> None:
        self.failures += 1
        self._events.record("save_failed", step=step, problem=problem, in_a_row=self._in_a_row)
        if jax.process_index() == 0:
            where = f"({self._in_a_row} of {MOST_FAILURES} in a row)"
            say(f"checkpoint of step {step} failed {where}: {problem}")

    def resume(
        self, abstract: TrainState, accept: Accept
    ) -> tuple[TrainState, int, list[str]] | None:
        """Return the newest state that restores, its step, and lines for the user; None if nothing was ever saved.

        Without a checkpoint, `checkpoint.branch_from` may name another run's, whose metrics are copied too. Newer
        checkpoints that do not restore are renamed (`quarantine`). Raises every error of `accept`, and `NotNow`
        if there are checkpoints and none restores, or the disk or the bucket fails.
        """
        local, copied = self._listed(), self._copied()
        skipped: dict[int, str] = {}

        def restore(step: int) -> tuple[TrainState, list[str]]:
            place = self.folder / str(step)
            if step in local:
                try:
                    return self._restore(place, place, abstract, accept)
                except Damaged as error:
                    if step not in copied:
                        raise
                    self._say_skipped(step, f"{error}; its copy is next")
            return self._fetched(step, abstract, accept)

        def skip(step: int, why: str) -> None:
            skipped[step] = why
            self._say_skipped(step, why)

        restored = restoring.newest(sorted({*local, *copied}), restore, skip)
        if restored is None and skipped:
            step, why = next(iter(skipped.items()))
            raise NotNow(
                f"no checkpoint in {self.folder} restores as it was saved; of step {step}: {why}. Nothing was renamed: "
                "if another host says the same, put a good one back, or start anew with checkpoint.resume=never"
            )
        if restored is None:
            return self._branch(abstract, accept)
        step, (state, notes) = restored
        on_process0(lambda: self._put_aside(skipped))
        if self._uploads is not None and step not in copied and jax.process_index() == 0:
            self._uploads.add(self.folder / str(step), rotate=True)
        return state, step, notes

    def _restore(
        self, place: Path, origin: object, abstract: TrainState, accept: Accept
    ) -> tuple[TrainState, list[str]]:
        """Restore the checkpoint at `place`, which came from `origin`, if `accept` takes its metadata."""
        meta = restoring.read_metadata(place)
        changes = [f"changed since: {change}" for change in accept(meta, origin)]
        return self._load(place, abstract, meta), [f"resumed from {origin}", *changes]

    def _fetched(
        self, step: int, abstract: TrainState, accept: Accept
    ) -> tuple[TrainState, list[str]]:
        """Fetch the copy of `step`, all processes a part, unless `accept` refuses its metadata, and restore it."""
        copies = self._copies
        assert copies is not None
        origin = f"{copies.url}/{step}"

        def begin() -> tuple[str, dict]:
            place = copies.fetch_metadata(step, self.folder)
            return str(place), metadata(place)

        name, meta = on_process0(begin)
        place = Path(name)
        accept(meta, origin)

        def plan() -> dict[str, int]:
            sizes = copies.sizes(step)
            announce_fetch(copies, self.folder, step, sizes)
            return sizes

        sizes = on_process0(plan)
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
        part = names[jax.process_index() :: jax.process_count()]
        on_all(lambda: copies.fetch(step, place, part))
        restored = self._restore(place, origin, abstract, accept)
        on_process0(lambda: complete(place))
        return restored

    def _say_skipped(self, step: int, why: str) -> None:
        if jax.process_index() == 0:
            say(f"SKIPPED CHECKPOINT of step {step}, which does not restore as it was saved: {why}")

    def _put_aside(self, skipped: dict[int, str]) -> None:
        """Free the steps that were skipped: the run comes to them again."""
        for step, why in skipped.items():
            place, name = self.folder / str(step), None
            if place.exists():
                name = quarantine(place).name
            if self._copies is not None:
                self._copies.forget(step)
            self._events.record("quarantined", step=step, why=why, name=name)

    def _branch(
        self, abstract: TrainState, accept: Accept
    ) -> tuple[TrainState, int, list[str]] | None:
        """Restore the checkpoint of another run that `checkpoint.branch_from` names; that run is only read."""
        point = branch_point(self._cfg.checkpoint.branch_from)
        if point is None:
            return None
        try:
            state, notes = self._restore(point, point, abstract, accept)
        except Damaged as error:
            fix = f"step {point.name} does not restore as it was saved ({error}); name another step"
            name = self._cfg.checkpoint.branch_from
            raise UserError(f"checkpoint.branch_from={name!r}: {fix}") from None
        bring_metrics(point, Path(self._cfg.log.run_dir))
        return state, int(point.name), notes

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Restore the state of `step`, bit for bit, in the shapes, types and shardings of `abstract`; see `_load`."""
        place = self.folder / str(step)
        return self._load(place, abstract, restoring.read_metadata(place))

    def _load(self, place: Path, abstract: TrainState, meta: dict) -> TrainState:
        """As `restore`.

        State that depends on the config (the loss scale of float16, the window of spikes) is initialized where the
        checkpoint holds none that fits, and dropped where the run has none. Raises `Damaged`.
        """
        check_model(meta, type(abstract.params), place)
        like, shapes = _shapes(abstract, meta)
        groups = restoring.load(place, meta, shapes)
        state = restoring.cast(from_checkpoint_layout(join(groups, like), like), like)
        return reset_optional_state(state, abstract, self._cfg)


def fits(abstract: TrainState, meta: dict) -> bool:
    """Return whether the metadata of a checkpoint lists exactly the arrays of `abstract`."""
    return not restoring.misfits(restoring.entries(meta), _shapes(abstract, meta)[1])


def _shapes(abstract: TrainState, meta: dict) -> tuple[TrainState, Groups]:
    """Return the state to load from a checkpoint with this metadata, and the arrays to read for it."""
    like = saved_shapes(abstract, config_from_dict(meta["config"]))
    return like, split(checkpoint_layout_shapes(like))


def checkpoint_folder(cfg: Config) -> Path:
    """Return the checkpoint folder of `cfg`, to which a run may write. Raises `UserError` as `check_path`."""
    check_path("log.run_dir", cfg.log.run_dir)
    return checkpoints_of(cfg.log.run_dir)


def _context() -> Any:
    # Made in the background, a folder that cannot be made leaves Orbax's threads waiting for it for minutes.
    options = quiet_imports.ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return quiet_imports.ocp.Context(async_options=options)


def _raising(error: Exception) -> Callable[[], None]:
    def wait():
        raise error

    return wait
