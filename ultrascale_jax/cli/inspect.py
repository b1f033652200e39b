"""Inspect a run: its checkpoints, its time, and the work of traced steps: `ultrascale inspect RUN`.

RUN is a run directory, or the URL of its copies, which have checkpoints alone. Unless it verifies, it reads only the
metadata of a checkpoint. Exit code 1: a checkpoint is damaged or cannot be read, or none is complete in a run that has
written some.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ultrascale_jax.checkpoint.copies import Copies, fetch_run
from ultrascale_jax.checkpoint.run_metadata import saved_config
from ultrascale_jax.checkpoint.step_dirs import (
    METADATA,
    Damaged,
    check_path,
    files,
    metadata,
    quarantined,
    steps,
)
from ultrascale_jax.cli import command_line, output, trace_tables
from ultrascale_jax.config import AXES, UserError, require
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.goodput import HEARTBEATS, Ledger, read_ledger
from ultrascale_jax.launch.run_files import CHECKPOINTS
from ultrascale_jax.storage.remote import is_url
from ultrascale_jax.units import size

TRACES = "profile"
"""Folder of a run's traces."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale inspect`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory of a training run, or the URL of its copies (checkpoint.store)."""
    checkpoint: Annotated[int | None, command_line.option("STEP")] = None
    """Look at this checkpoint alone, and verify it."""
    verify: command_line.Flag = False
    """Restore the arrays on one device, and compare their fingerprints; --fetch copies first."""
    arrays: command_line.Flag = False
    """List the arrays of the checkpoints with type, shape and fingerprint."""
    trace: command_line.Flag = False
    """Look at the steps traced by --profile alone."""
    fetch: Annotated[str | None, command_line.option("DIR")] = None
    """Fetch from a URL the checkpoint of --checkpoint, or the newest, as a new run directory, and verify it."""
    json: command_line.Flag = False
    """Print one JSON object instead of tables."""

    def __post_init__(self):
        remote = is_url(self.run)
        require(not self.fetch or remote, "fetch", self.fetch, "needs the URL of copies")
        fix = "reads a disk; give --fetch DIR, which verifies the checkpoint that it fetches"
        require(not (self.verify and remote and not self.fetch), "verify", True, fix)
        both = self.trace and self.checkpoint is not None
        require(not both, "trace", True, "looks at no checkpoint; leave out one of them")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its own files describe it; None where they do not."""

    step: int
    state: str
    sound: bool
    size_bytes: int | None = None
    saved: float | None = None
    """Time of the save (Unix, s)."""
    versions: Mapping[str, str] | None = None
    mesh: Mapping[str, int] | None = None
    arrays: Mapping[str, Sequence[Any]] | None = None
    """Type, shape and fingerprint of each array, if requested."""

    def row(self) -> tuple[str, ...]:
        """Return step, size, age, versions, mesh and state as text."""
        age = f"{(time.time() - self.saved) / 3600:.1f} h ago" if self.saved else "?"
        versions = [f"{name} {(self.versions or {}).get(name, '?')}" for name in ("jax", "python")]
        mesh = [f"{axis}={ranks}" for axis, ranks in (self.mesh or {}).items() if ranks != 1]
        words = ",".join(mesh) or ("?" if self.mesh is None else "1 device")
        number = "?" if self.size_bytes is None else size(self.size_bytes)
        return str(self.step), number, age, " ".join(versions), words, self.state


@dataclass(frozen=True)
class Inspection:
    """The requested parts of a run that it has."""

    run: str
    checkpoints: Sequence[Checkpoint] | None = None
    put_aside: Sequence[str] = ()
    """Names of checkpoints that a run has found damaged."""
    time: Ledger | None = None
    trace: Mapping[str, Any] | None = None
    """The report of `plan/profile/report.py`."""

    @property
    def sound(self) -> bool:
        """Return whether every checkpoint is sound, and a run that has written some has one."""
        checkpoints = self.checkpoints or ()
        all_sound = all(checkpoint.sound for checkpoint in checkpoints)
        return all_sound and bool(checkpoints or not self.put_aside)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self.checkpoints:
            parts.append(_table(self.checkpoints))
            parts += [_arrays(checkpoint) for checkpoint in self.checkpoints if checkpoint.arrays]
        elif self.checkpoints is not None:
            parts.append(output.plain(f"there is no complete checkpoint in {self.run}"))
        parts += [output.plain(f"{name} was put aside as damaged") for name in self.put_aside]
        if self.time is not None:
            parts += [*[""] * bool(parts), Text(self.time.table())]
        if self.trace is not None:
            parts += [*[""] * bool(parts), trace_tables.tables(self.trace)]
        return Group(*parts)


def _table(checkpoints: Sequence[Checkpoint]) -> Table:
    table = output.table((), ["step", "size"], ["saved", "versions", "mesh", "state"])
    for checkpoint in checkpoints:
        table.add_row(*map(output.plain, checkpoint.row()))
    return table


def _arrays(checkpoint: Checkpoint) -> Table:
    table = output.table([f"array of step {checkpoint.step}", "type", "shape", "fingerprint"], ())
    for name, (dtype, shape, mark) in (checkpoint.arrays or {}).items():
        table.add_row(*map(output.plain, (name, dtype, str(tuple(shape)), mark)))
    return table


def inspect(options: Options) -> Inspection:
    """Read the parts that the options name. Raises `UserError` for a run or a part that is missing."""
    if is_url(options.run):
        copies = Copies(options.run)
        available = copies.steps()
        fix = "holds no copy of a checkpoint; name a run's checkpoint.store"
        require(bool(available), "run", copies.url, fix)
        chosen = _chosen(options, available, copies.url)
        return Inspection(options.run, [_copy(copies, step, options) for step in chosen])
    run_dir = Path(options.run)
    check_path("run", run_dir, writes=False)
    saved_config(run_dir)  # raises unless it is a run directory
    if options.trace:
        return Inspection(options.run, trace=_trace(run_dir))
    folder = run_dir / CHECKPOINTS
    chosen = _chosen(options, steps(folder), str(folder))
    result = Inspection(options.run, [_on_disk(folder / str(step), options) for step in chosen])
    if options.checkpoint is not None:
        return result
    ledger = read_ledger(run_dir) if (run_dir / HEARTBEATS).is_dir() else None
    result = replace(result, put_aside=quarantined(folder), time=ledger)
    if (run_dir / TRACES).is_dir():
        try:
            return replace(result, trace=_trace(run_dir))
        except UserError as error:
            say(f"note: {error}", sys.stderr)
    return result


def _trace(run_dir: Path) -> Mapping[str, Any]:
    from ultrascale_jax.plan.profile.report import read_report

    with output.working("reading the trace"):
        return read_report(run_dir)


def _chosen(options: Options, available: Sequence[int], place: str) -> Sequence[int]:
    """Return the step that the options name, or all that are available."""
    if options.checkpoint is None:
        return available
    fix = f"{place} holds the steps {list(available)}"
    require(options.checkpoint in available, "checkpoint", options.checkpoint, fix)
    return [options.checkpoint]


def _on_disk(place: Path, options: Options) -> Checkpoint:
    """Look at the checkpoint at `place`."""
    try:
        with output.working(f"reading step {place.name}"):
            words = state(place, verify=options.verify or options.checkpoint is not None)
        return _described(place, words, True, options)
    except Damaged as error:
        return _described(place, f"DAMAGED: {error}", False, options)
    except (UserError, OSError) as error:
        return _described(place, f"CANNOT BE READ: {error}", False, options)


def state(place: Path, *, verify: bool) -> str:
    """Describe the checkpoint at `place`. Raises `Damaged`."""
    files(place)
    metadata(place)
    if not verify:
        return "complete"
    from ultrascale_jax.checkpoint import load_params
    from ultrascale_jax.launch.distributed import find_devices

    find_devices()
    load_params.verify(place)
    return "verified"


def _copy(copies: Copies, step: int, options: Options) -> Checkpoint:
    """Look at the metadata of a copy in object storage."""
    with tempfile.TemporaryDirectory() as folder:
        place, words, sound = copies.fetch_metadata(step, Path(folder)), "complete", True
        try:
            metadata(place)
        except Damaged as error:
            words, sound = f"DAMAGED: {error}", False
        num_bytes = sum(copies.sizes(step).values())
        return replace(_described(place, words, sound, options), size_bytes=num_bytes)


def _described(place: Path, words: str, sound: bool, options: Options) -> Checkpoint:
    """Return the checkpoint that the files at `place` describe, as far as they can be read."""
    made = Checkpoint(int(place.name), words, sound)
    unreadable = (Damaged, OSError, AttributeError, TypeError)
    with contextlib.suppress(*unreadable):
        made = replace(made, size_bytes=sum(files(place).values()))
    with contextlib.suppress(*unreadable):
        made = replace(made, saved=(place / METADATA).stat().st_mtime)
    with contextlib.suppress(*unreadable):
        meta = metadata(place)
        versions = {name: str(version) for name, version in meta["versions"].items()}
        mesh = {axis: meta["config"].get("mesh", {}).get(axis, 1) for axis in AXES}
        arrays = meta["arrays"] if options.arrays and sound else None
        made = replace(made, versions=versions, mesh=mesh, arrays=arrays)
    return made


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale inspect"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        if options.fetch:
            folder = Path(options.fetch)
            fix = "exists; name a new folder"
            require(not folder.exists(), "fetch", options.fetch, fix)
            check_path("fetch", folder)
            fetch_run(options.run, folder, options.checkpoint)
            options = replace(options, run=options.fetch, fetch=None, verify=True)
        result = inspect(options)
        output.show("inspect", result, as_json=options.json)
    if not result.sound:
        raise SystemExit(1)
