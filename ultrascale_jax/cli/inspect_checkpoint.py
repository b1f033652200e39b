"""List a run's checkpoints, and check that they are what was saved: `ultrascale inspect-checkpoint RUN_DIR`.

Lists step, size, age, versions and mesh of the run that saved it, and its state. Without --verify only the metadata is
read. Exit code 1: one is damaged or cannot be read, or there is none.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

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
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.generate import printable
from ultrascale_jax.config import AXES, UserError, require
from ultrascale_jax.launch.run_files import CHECKPOINTS, folder_of
from ultrascale_jax.storage.remote import is_url


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale inspect-checkpoint`."""

    run_dir: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_DIR")]
    """Run directory of a training run, or the URL of its copies (checkpoint.store)."""
    step: Annotated[int | None, command_line.option("N", "all")] = None
    """Look at this one only, and verify it."""
    verify: command_line.Flag = False
    """Restore the arrays on one device and compare their fingerprints."""
    arrays: command_line.Flag = False
    """List the arrays with type, shape and fingerprint."""
    fetch: Annotated[str | None, command_line.option("DIR")] = None
    """Of a URL: fetch the checkpoint of --step, or the newest, as a new run directory."""


def state(place: Path, *, verify: bool) -> str:
    """Describe the checkpoint at `place` in a few words. Raises `Damaged`."""
    files(place)
    metadata(place)
    if not verify:
        return "complete"
    from ultrascale_jax.checkpoint import load_params
    from ultrascale_jax.launch.distributed import find_devices

    find_devices()
    load_params.verify(place)
    return "verified"


def line(place: Path, words: str, num_bytes: int | None = None) -> str:
    """Return one row of the list: the checkpoint's own metadata, as far as it can be read, and its state."""
    try:
        found = sum(files(place).values()) if num_bytes is None else num_bytes
        size = f"{found / 1e6:,.1f} MB"
    except (Damaged, OSError):
        size = "?"
    try:
        meta = metadata(place)
        versions = f"jax {meta['versions'].get('jax')} python {meta['versions'].get('python')}"
        mesh = meta["config"].get("mesh", {})
        sizes = [f"{axis}={mesh[axis]}" for axis in AXES if mesh.get(axis, 1) != 1] or ["1 device"]
        age = f"{(time.time() - (place / METADATA).stat().st_mtime) / 3600:.1f} h ago"
    except (Damaged, OSError, AttributeError, TypeError):
        versions, sizes, age = "?", ["?"], "?"
    return f"{place.name:>8} {size:>14} {age:>12}  {versions:32} {','.join(sizes):20} {words}"


def list_folder(options: Options) -> bool:
    """Print the checkpoints of a run directory; return whether there are any, and all are sound."""
    damaged = False
    run_dir = Path(options.run_dir)
    check_path("run_dir", run_dir, writes=False)
    saved_config(run_dir)  # refuses what is no run directory
    folder = folder_of(run_dir, CHECKPOINTS, make=False)
    there = steps(folder)
    fix = f"{folder} holds the steps {there}"
    require(options.step is None or options.step in there, "step", options.step, fix)
    for step in there if options.step is None else [options.step]:
        place, verify = folder / str(step), options.verify or options.step is not None
        try:
            with output.working(f"reading step {step}"):
                words = state(place, verify=verify)
        except Damaged as error:
            damaged, words = True, f"DAMAGED: {error}"
        except (UserError, OSError) as error:
            damaged, words = True, f"CANNOT BE READ: {error}"
        print(printable(line(place, words)))
        if options.arrays and not words.startswith(("DAMAGED", "CANNOT")):
            print_arrays(place)
    for name in quarantined(folder) if options.step is None else ():
        print(printable(f"{name:>8} was put aside as damaged"))
    if not there:
        print(printable(f"there is no complete checkpoint in {folder}"))
    return bool(there) and not damaged


def list_copies(options: Options) -> bool:
    """List copies in object storage as `list_folder` does, by their metadata, names and sizes."""
    copies, damaged = Copies(options.run_dir), False
    there = copies.steps()
    fix = f"{copies.url} holds the steps {there}"
    require(options.step is None or options.step in there, "step", options.step, fix)
    for step in there if options.step is None else [options.step]:
        with tempfile.TemporaryDirectory() as folder:
            place, num_bytes, words = Path(folder) / str(step), None, "complete"
            try:
                place = copies.fetch_metadata(step, Path(folder))
                num_bytes = sum(copies.sizes(step).values())
            except Damaged as error:
                damaged, words = True, f"DAMAGED: {error}"
            print(printable(line(place, words, num_bytes)))
            if options.arrays and not words.startswith("DAMAGED"):
                print_arrays(place)
    if not there:
        print(printable(f"there is no complete checkpoint in {copies.url}"))
    return bool(there) and not damaged


def print_arrays(place: Path) -> None:
    """Print the arrays of the checkpoint at `place`, with type, shape and fingerprint."""
    for name, (dtype, shape, mark) in metadata(place)["arrays"].items():
        print(printable(f"{'':8} {name:48} {dtype:10} {tuple(shape)!s:24} {mark}"))


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale inspect-checkpoint"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        remote = is_url(options.run_dir)
        require(remote or not options.fetch, "fetch", options.fetch, "needs the URL of copies")
        fix = "needs the checkpoints on a disk: give --fetch DIR as well"
        require(not (remote and options.verify and not options.fetch), "verify", True, fix)
        if options.fetch:
            folder = Path(options.fetch)
            fix = "exists; name a new folder"
            require(not folder.exists(), "fetch", options.fetch, fix)
            check_path("fetch", folder)
            fetch_run(options.run_dir, folder, options.step)
            options = replace(options, run_dir=options.fetch)
        sound = list_copies(options) if is_url(options.run_dir) else list_folder(options)
    if not sound:
        raise SystemExit(1)
