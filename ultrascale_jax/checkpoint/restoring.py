"""Restore a checkpoint only as it was saved: every array must have the fingerprint that the metadata lists.

One rule decides about damage: a checkpoint that does not restore so, for whatever reason, is skipped with a line, and
the next older one is tried. All processes come to one verdict, because each would wait for ever for the others. Only a
disk or a network that fails ends the run instead (`NotNow`): the next start may read the same checkpoint.
"""

import errno
import functools
import gc
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax import quiet_imports
from ultrascale_jax.checkpoint.fingerprint import fingerprints
from ultrascale_jax.checkpoint.layout import Groups, name, named
from ultrascale_jax.checkpoint.step_dirs import (
    GROUPS,
    METADATA,
    PARTS,
    check_path,
    files,
    metadata,
    steps,
)
from ultrascale_jax.config import UserError, require, whole
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.failures import Damaged
from ultrascale_jax.launch.multihost import on_all, on_process0
from ultrascale_jax.sharding.memories import on_device

LOOK_S = 60.0
"""Seconds that a process looks for a checkpoint that process 0 sees: as long as NFS caches a folder."""

LONGEST = 500
"""Characters of an error that are reported."""


def newest[Restored](
    steps: Sequence[int],
    restore: Callable[[int], Restored],
    skipped: Callable[[int, str], None],
) -> tuple[int, Restored] | None:
    """Return the newest of `steps` (ascending) that `restore` restores, and its result; None if none does.

    `skipped` gets the step and the reason of each for which `restore` raises `Damaged`.
    """
    for step in reversed(steps):
        try:
            return step, restore(step)
        except Damaged as error:
            skipped(step, str(error))
        gc.collect()  # The exception held arrays that were read before.
    return None


def chosen_or_newest[Restored](
    folder: Path, step: int | None, restore: Callable[[int], Restored]
) -> Restored:
    """Return `restore(step)`, or without a step that of the newest in `folder` that restores; warn of newer ones.

    Raises `UserError` where there is no such step, and `Damaged` where none restores. Nothing is renamed.
    """
    available = on_process0(lambda: steps(folder))
    fix = "holds no complete step" if folder.is_dir() else "there is no such folder"
    require(len(available) > 0, "folder", str(folder), fix)
    chosen = max(available) if step is None else whole("step", step)
    require(chosen in available, "step", chosen, f"{folder} holds the steps {available}")
    problems: list[str] = []

    def skipped(step: int, why: str) -> None:
        problems.append(f"{folder / str(step)} does not restore as it was saved: {why}")

    restored = newest(available if step is None else [chosen], restore, skipped)
    if restored is None:
        raise Damaged(problems[0])
    if jax.process_index() == 0:
        for problem in problems:
            say(f"warning: {problem}; using step {restored[0]}")
    return restored[1]


def read_metadata(
    place: Path, groups: Sequence[str] = GROUPS, parts: Sequence[str] = PARTS
) -> dict:
    """Return the metadata of the checkpoint at `place`, on all processes, as process 0 reads it.

    The checkpoint has these groups of arrays, and its metadata these parts.

    Raises `Damaged` where a file is missing or the metadata is not as it was saved, `NotNow`, and `UserError` as
    `check_path`.
    """

    def read() -> dict:
        files(place, groups)
        return metadata(place, parts)

    check_path("checkpoint", place, writes=False)
    meta = on_process0(read)
    on_all(lambda: _await(place / METADATA))
    return meta


def load(
    place: Path, meta: dict, shapes: Groups, titles: Mapping[str, str] | None = None
) -> Groups:
    """Load the arrays of the checkpoint at `place`, with the metadata `meta`, in the shardings of `shapes`.

    Errors call an array by its title, or without one by its full name.

    Raises `Damaged`, on all processes, where an array cannot be read or is not the one that was saved, and `UserError`
    where the checkpoint holds other arrays than `shapes`.
    """
    saved = entries(meta)
    _check_form(saved, shapes)
    quieten_orbax()
    shapes = jax.tree.map_with_path(
        lambda keys, s: jax.ShapeDtypeStruct(s.shape, saved[name(keys)][0], sharding=s.sharding),
        shapes,
    )
    loaded: Groups = {}
    # One by one: of two, Orbax forgets the second when the first cannot be read.
    for group, inner in shapes.items():
        loaded |= on_all(functools.partial(_read, place, {group: inner}))
    marks = fingerprints(named(loaded))
    changed = [name for name, mark in marks.items() if mark != saved[name][2]]

    def refuse_changed() -> None:
        if changed:
            title = (titles or {}).get(changed[0], changed[0])
            others_text = f", nor are {len(changed) - 1} more" if len(changed) > 1 else ""
            raise Damaged(f"array {title} is not what was saved (fingerprint){others_text}")

    on_all(refuse_changed)
    return loaded


def _read(place: Path, shapes: Groups) -> Groups:
    """Return one group of arrays of the checkpoint at `place`. Raises `Damaged`."""
    try:
        return quiet_imports.ocp.load_checkpointables(str(place), shapes)
    except Exception as error:  # TensorStore raises one type for all that goes wrong.
        [group], root = shapes, _root(error)
        words = f"{group} cannot be read ({type(root).__name__}: {first_line(root)})"
        raise Damaged(f"{words} on {socket.gethostname()}") from error


def record(groups: Groups) -> dict[str, list]:
    """Return type, shape and fingerprint of each array, for the metadata; wait for the devices, not for a copy."""
    arrays = named(groups)
    marks = fingerprints(arrays)
    return {name: [str(x.dtype), list(x.shape), marks[name]] for name, x in arrays.items()}


def entries(meta: dict) -> dict[str, tuple]:
    """Return type, shape and fingerprint by array. Raises `Damaged` if malformed."""
    try:
        return {
            name: (jnp.dtype(dtype), tuple(map(int, shape)), str(mark))
            for name, (dtype, shape, mark) in meta["arrays"].items()
        }
    except (TypeError, ValueError) as error:
        raise Damaged(f"the list of arrays cannot be read ({error})") from None


def misfits(saved: Mapping[str, tuple], shapes: Groups) -> list[str]:
    """Return, one a line, the arrays that a checkpoint holds in another shape than `shapes`, or not at all."""
    expected = {name: tuple(s.shape) for name, s in named(shapes).items()}
    saved_shapes = {
        name: shape for name, (_, shape, _) in saved.items() if name.split("/")[0] in shapes
    }
    return [
        f"{name}: saved {saved_shapes.get(name, 'nothing')}, now {expected.get(name, 'nothing')}"
        for name in sorted(saved_shapes | expected)
        if saved_shapes.get(name) != expected.get(name)
    ]


def _check_form(saved: Mapping[str, tuple], shapes: Groups) -> None:
    changes = misfits(saved, shapes)
    if changes:
        omitted = [f"and {len(changes) - 8} more"] if len(changes) > 8 else []
        raise UserError(
            "the checkpoint holds other arrays than this run has:\n  "
            + "\n  ".join(changes[:8] + omitted)
            + "\nno option makes them fit; put the model and the optimizer back, or choose another --log.run-dir"
        )


def cast[Tree](tree: Tree, like: Tree) -> Tree:
    """Cast arrays to the types of `like`: a run may be allowed to change them."""

    def leaf(x: jax.Array, s: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == s.dtype:
            return x
        return jax.device_put(on_device(x).astype(s.dtype), s.sharding)

    return jax.tree.map(leaf, tree, like)


def _await(path: Path) -> None:
    """Wait until this process sees `path`, which process 0 has seen. Raises `FileNotFoundError` after `LOOK_S`."""
    until = time.monotonic() + LOOK_S
    while True:
        # A listing asks an NFS server anew where a name that was not there is remembered.
        if path.parent.is_dir() and path.name in os.listdir(path.parent):
            return
        if time.monotonic() >= until:
            raise FileNotFoundError(errno.ENOENT, "process 0 sees it, this one does not", str(path))
        time.sleep(1.0)


def _root(error: BaseException) -> BaseException:
    """Return the first cause of an exception, which Orbax wraps in another message."""
    while True:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            return error
        error = cause


def first_line(error: BaseException) -> str:
    """Return an error's message without TensorStore's list of all its settings."""
    return next(iter(str(error).splitlines()), "").partition(" [tensorstore_spec")[0][:LONGEST]


def quieten_orbax() -> None:
    """Drop Orbax's own log of an error, a thousand lines long: Orbax raises the error as well."""
    # When a load fails, reads that were not begun are dropped, and the others end after their event loop.
    warnings.filterwarnings("ignore", r"coroutine '[\w.]+' was never awaited", RuntimeWarning)
    for library in ("absl", "asyncio"):
        logger = logging.getLogger(library)
        if _not_of_orbax not in logger.filters:
            logger.addFilter(_not_of_orbax)
    if getattr(sys.unraisablehook, "func", None) is not _unless_loop_is_closed:
        sys.unraisablehook = functools.partial(_unless_loop_is_closed, sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    source = record.getMessage() if record.name == "asyncio" else record.pathname
    return "orbax" not in source and "tensorstore" not in source


def _unless_loop_is_closed(hook: Callable[[Any], object], raised: Any) -> None:
    """Pass an exception that nobody can catch on to `hook`, but for a read that ends after its event loop."""
    if str(raised.exc_value) != "Event loop is closed":
        hook(raised)
