"""Reading a checkpoint only if it is what was saved: first its files, then, on the devices, its arrays.

The manifest finds what a disk or a hand did to a file, and names it. The fingerprints find what happened to an array
anywhere between the devices that saved it and those that have it now, on whatever mesh, and name it; they also decide
where the manifest is missing. All processes come to one verdict, because each would wait for ever for the others.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from ultrascale_jax.config import UserError
from ultrascale_jax.reliability import manifest
from ultrascale_jax.reliability.fingerprint import fingerprints
from ultrascale_jax.reliability.manifest import Damaged
from ultrascale_jax.reliability.steps import metadata
from ultrascale_jax.training.groups import Groups, name, named

LONGEST = 500
"""Bytes of a process's complaint that the others learn of."""

UNPROVEN = "has no manifest (its writer was ended in between); its arrays have their fingerprints"
UNVERIFIED = "is older than fingerprints: nothing tells whether its arrays are what was saved"


def agree(problem: str | None) -> str | None:
    """The first process's problem of all that have one; every process calls it."""
    if jax.process_count() == 1:
        return problem
    text = np.zeros(LONGEST, np.uint8)
    words = np.frombuffer((problem or "").encode()[:LONGEST], np.uint8)
    text[: len(words)] = words
    said = [bytes(row).rstrip(b"\0") for row in multihost_utils.process_allgather(text)]
    return next((words.decode(errors="ignore") for words in said if words), None)


def record(groups: Groups) -> dict[str, list]:
    """Type, shape and fingerprint of each array, for the metadata; the host waits for the devices, not for a copy."""
    arrays = named(groups)
    marks = fingerprints(arrays)
    return {name: [str(x.dtype), list(x.shape), marks[name]] for name, x in arrays.items()}


def opened(place: Path) -> tuple[dict, str | None]:
    """Metadata of the checkpoint at `place`, whose files are as they were saved, and what is to be told of it.

    Its processes share the reading. Raises `Damaged`, on all of them.
    """
    problem, sealed, meta = None, False, {}
    try:
        sealed = manifest.check(place, jax.process_index(), jax.process_count())
        meta = metadata(place)
    except (Damaged, OSError) as error:
        problem = str(error)
    problem = agree(problem)
    if problem is not None:
        raise Damaged(problem)
    if "arrays" not in meta:
        return meta, f"{place} {UNVERIFIED}"
    return meta, None if sealed else f"{place} {UNPROVEN}"


def load(orbax: ocp.training.Checkpointer, step: int, meta: dict, shapes: Groups) -> Groups:
    """Arrays of a checkpoint that `opened` has looked at, in the shardings of `shapes` and of the types saved.

    Raises:
        UserError: the arrays of `shapes` are not those that it holds.
        Damaged: an array is not what was saved.
    """
    known = entries(meta)
    if known is not None:
        _check_form(known, shapes)
        shapes = jax.tree.map_with_path(
            lambda keys, s: jax.ShapeDtypeStruct(
                s.shape, known[name(keys)][0], sharding=s.sharding
            ),
            shapes,
        )
    problem: str | None = None
    loaded: Groups = {}
    try:
        for group, inner in shapes.items():
            # One by one: of two, Orbax forgets the second when the first cannot be read.
            loaded |= orbax.load_checkpointables(step, {group: inner})
    except Exception as error:
        place = Path(str(orbax.directory)) / str(step)
        if (place / manifest.NAME).exists():
            raise  # the files are those that were saved, so it is something else
        problem = f"cannot be read ({type(error).__name__}: {first_line(error)})"
    problem = agree(problem)
    if problem is not None:
        raise Damaged(problem)
    if known is not None:
        _compare(known, loaded)
    return loaded


def cast[Tree](tree: Tree, like: Tree) -> Tree:
    """Arrays in the types of `like`: a run may be allowed to change them."""
    return jax.tree.map(lambda x, s: x if x.dtype == s.dtype else x.astype(s.dtype), tree, like)


def first_line(error: BaseException) -> str:
    """What an error says, without TensorStore's account of all its settings."""
    return next(iter(str(error).splitlines()), "").partition(" [tensorstore_spec")[0][:LONGEST]


def entries(meta: dict) -> dict[str, tuple] | None:
    """Type, shape and fingerprint by array; none for an old checkpoint. Raises `Damaged` where they are no such."""
    if "arrays" not in meta:
        return None
    try:
        return {
            name: (jnp.dtype(dtype), tuple(map(int, shape)), str(mark))
            for name, (dtype, shape, mark) in meta["arrays"].items()
        }
    except (TypeError, ValueError) as error:
        raise Damaged(f"the list of arrays cannot be read ({error})") from None


def _check_form(known: Mapping[str, tuple], shapes: Groups) -> None:
    wanted = {name: tuple(s.shape) for name, s in named(shapes).items()}
    saved = {name: shape for name, (_, shape, _) in known.items() if name.split("/")[0] in shapes}
    changes = [
        f"{name}: saved {saved.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}"
        for name in sorted(saved | wanted)
        if saved.get(name) != wanted.get(name)
    ]
    if changes:
        more = [f"and {len(changes) - 8} more"] if len(changes) > 8 else []
        raise UserError(
            "the checkpoint holds other arrays than this run has:\n  "
            + "\n  ".join(changes[:8] + more)
            + "\nno option makes them fit; put the model and the optimizer back"
        )


def _compare(known: Mapping[str, tuple], loaded: Groups) -> None:
    marks = fingerprints(named(loaded))
    wrong = [name for name, mark in marks.items() if mark != known[name][2]]
    if wrong:
        more = f", nor are {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise Damaged(f"array {wrong[0]} is not what was saved (fingerprint){more}")
