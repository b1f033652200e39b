"""List a run's checkpoints, and check that they are what was saved: `ultrascale inspect-checkpoint RUN_DIR`.

Lists step, size, age, versions and mesh of the run that saved it, and its state. Without --verify only names and sizes
of files are compared with the manifest. Exit code 1: one is damaged or cannot be read, or there is none.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale_jax.checkpoint import manifest
from ultrascale_jax.checkpoint.manifest import Damaged, Unreadable
from ultrascale_jax.checkpoint.run_metadata import saved_config
from ultrascale_jax.checkpoint.step_dirs import METADATA, metadata, quarantined, steps
from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.generate import printable
from ultrascale_jax.config import AXES, require
from ultrascale_jax.launch.run_files import CHECKPOINTS, folder_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale inspect-checkpoint`."""

    run_dir: tyro.conf.Positional[Path]
    """Run directory of a training run."""
    step: Annotated[int | None, command_line.option("N", "all")] = None
    """Look at this one only, and verify it."""
    verify: command_line.Flag = False
    """Read every byte: by the manifest, or where there is none by the arrays' fingerprints, which takes a device."""
    arrays: command_line.Flag = False
    """List the arrays with type, shape and fingerprint."""


def state(place: Path, *, verify: bool) -> str:
    """Describe the checkpoint at `place` in a few words. Raises `Damaged`."""
    meta = metadata(place)
    if manifest.check(place, contents=verify):
        return "verified" if verify else "complete"
    if not verify or "arrays" not in meta:
        return "no manifest" if "arrays" in meta else "older than manifests"
    from ultrascale_jax.checkpoint.load_params import check_arrays

    check_arrays(place, meta)
    return "arrays verified, no manifest"


def line(place: Path, words: str) -> str:
    """Return one row of the list: the checkpoint's own metadata, as far as it can be read, and its state."""
    try:
        size = f"{sum(manifest.files(place).values()) / 1e6:,.1f} MB"
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


def main(argv: Sequence[str]) -> None:
    damaged = False
    with command_line.user_errors():
        prog = "ultrascale inspect-checkpoint"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        saved_config(options.run_dir)  # refuses what is no run directory
        folder = folder_of(options.run_dir, CHECKPOINTS, make=False)
        there = steps(folder)
        fix = f"{folder} holds the steps {there}"
        require(options.step is None or options.step in there, "step", options.step, fix)
        for step in there if options.step is None else [options.step]:
            place, verify = folder / str(step), options.verify or options.step is not None
            try:
                words = state(place, verify=verify)
            except Damaged as error:
                damaged, words = True, f"DAMAGED: {error}"
            except (Unreadable, OSError) as error:
                damaged, words = True, f"CANNOT BE READ: {error}"
            print(printable(line(place, words)))
            if options.arrays and not words.startswith(("DAMAGED", "CANNOT")):
                for name, (dtype, shape, mark) in metadata(place).get("arrays", {}).items():
                    print(printable(f"{'':8} {name:48} {dtype:10} {tuple(shape)!s:24} {mark}"))
        for name in quarantined(folder) if options.step is None else ():
            print(printable(f"{name:>8} was put aside as damaged"))
        if not there:
            print(printable(f"there is no complete checkpoint in {folder}"))
    if damaged or not there:
        raise SystemExit(1)
