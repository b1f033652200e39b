"""Read a checkpoint only if it is unchanged: check first its files, then, on the devices, its arrays.

The manifest finds what a disk or a hand did to a file, and names it. The fingerprints find what happened to an array
anywhere between the devices that saved it and those that have it now, on whatever mesh, and name it; they also decide
where the manifest is missing. All processes come to one verdict, because each would wait for ever for the others.
"""

import contextlib
import errno
import functools
import gc
import json
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
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.metadata.step_metadata_serialization import deserialize

from ultrascale_jax.checkpoint import manifest
from ultrascale_jax.checkpoint.fingerprint import fingerprints
from ultrascale_jax.checkpoint.layout import Groups, name, named
from ultrascale_jax.checkpoint.manifest import Damaged, Doubtful, Unreadable
from ultrascale_jax.checkpoint.step_dirs import METADATA, check_path, check_stores, metadata
from ultrascale_jax.config import UserError
from ultrascale_jax.launch import multihost
from ultrascale_jax.launch.failures import denied
from ultrascale_jax.launch.multihost import agree, hosts
from ultrascale_jax.launch.run_files import read_regular
from ultrascale_jax.storage.remote import RemoteError

LOOK_S = 60.0
"""Seconds that a process looks for a checkpoint that process 0 sees: as long as NFS caches a folder."""

LONGEST = 500
"""Bytes of an error that are reported."""

UNPROVEN = "has no manifest (its writer was ended in between); its arrays have their fingerprints"


def found_by_process0[Value](find: Callable[[], Value]) -> Value:
    """Return `find()` of process 0, as JSON carries it, on all processes; the others may see less, so they do not look.

    Raises on all processes what `find` raises: `Damaged` or another `UserError`, and for an `OSError` `Unreadable`, or
    `UserError` where a file may not be used.
    """
    found, error = None, None
    if jax.process_index() == 0:
        found, error = _tried(find)
    raise_on_all(error)
    return multihost.broadcast_from_process0(found)


def raise_on_all(error: UserError | None) -> None:
    """Raise one process's error on all processes: a checkpoint that is damaged for one is damaged for all."""
    for kind in (Damaged, Unreadable, Doubtful, UserError):
        mine = error is not None and type(error) is kind
        problem = agree(str(error) if mine else None)
        if problem is not None:
            raise kind(problem) from error


def on_all(do: Callable[[], None]) -> None:
    """Call `do` on every process, and raise on all what it raises on one, as `found_by_process0` does."""
    raise_on_all(_tried(do)[1])


def _tried[Value](do: Callable[[], Value]) -> tuple[Value | None, UserError | None]:
    """Return `do()`, or its `UserError`."""
    try:
        return do(), None
    except (Damaged, Unreadable) as error:
        return None, error
    except RemoteError as error:
        kind = Unreadable if error.exit_code == Unreadable.exit_code else UserError
        return None, kind(str(error))
    except UserError as error:
        return None, UserError(str(error))
    except OSError as error:
        if (refusal := denied(error)) is not None:
            return None, refusal
        where = f"{error.filename}: " if error.filename else ""
        what = f"{where}cannot be read on {socket.gethostname()} ({error.strerror or error})"
        return None, Unreadable(f"{what}; nothing was renamed, and a restart tries again")


def record(groups: Groups) -> dict[str, list]:
    """Return type, shape and fingerprint of each array, for the metadata; wait for the devices, not for a copy."""
    arrays = named(groups)
    marks = fingerprints(arrays)
    return {name: [str(x.dtype), list(x.shape), marks[name]] for name, x in arrays.items()}


def opened(place: Path) -> tuple[dict, str | None]:
    """Check the files of the checkpoint at `place`; return its metadata, and a message for the user or None.

    Process 0 looks at names and sizes, and all share the reading. Raises `Damaged` or `Unreadable`, on all of them, and
    `UserError` as `check_path`.
    """

    def look() -> tuple[bool, dict]:
        sealed, meta = manifest.check(place, contents=False), metadata(place)
        check_stores(place)
        return sealed, meta

    def look_twice() -> tuple[bool, dict]:
        with contextlib.suppress(Damaged):
            return look()
        return look()

    quieten_orbax()
    check_path("checkpoint", place, writes=False)
    sealed, meta = found_by_process0(look_twice)

    def read() -> None:
        _await(place / METADATA)
        if sealed:
            _await(place / manifest.NAME)
            manifest.check_contents(place, jax.process_index(), jax.process_count())

    on_all(read)
    return meta, None if sealed else f"{place} {UNPROVEN}"


def load(place: Path, meta: dict, shapes: Groups) -> Groups:
    """Load the arrays of the checkpoint at `place`, which `opened` checked, in the shardings of `shapes`.

    Raises:
        UserError: the arrays of `shapes` are not those that it holds.
        Damaged: an array is not what was saved.
        Unreadable: something else than its files was in the way: a disk, a device or the memory of a host.
        Doubtful: one or the other; see `newest`.
    """
    known = entries(meta)
    _check_form(known, shapes)
    shapes = jax.tree.map_with_path(
        lambda keys, s: jax.ShapeDtypeStruct(s.shape, known[name(keys)][0], sharding=s.sharding),
        shapes,
    )
    sealed = found_by_process0(lambda: os.path.exists(place / manifest.NAME))
    loaded = _loaded(place, shapes, sealed)
    wrong = _different(known, loaded)
    if wrong is not None:
        loaded = _loaded(place, shapes, sealed)
        wrong = _different(known, loaded)
    if wrong is not None and sealed:
        # The files are those that were saved, so it is what became of them on the way.
        raise Unreadable(
            f"{place}: {wrong}, twice, although its files are (manifest): the memory of a device or of a host, one "
            f"of {', '.join(sorted(set(hosts())))}, changes it. Nothing was renamed; if other hosts say the same, "
            "it was written so, and is to be renamed by hand"
        )
    if wrong is not None:
        raise Damaged(wrong)
    return loaded


def _loaded(place: Path, shapes: Groups, sealed: bool) -> Groups:
    loaded: Groups = {}
    # One by one: of two, Orbax forgets the second when the first cannot be read.
    for group, inner in shapes.items():
        failed: UserError | None = None
        try:
            loaded |= ocp.load_checkpointables(str(place), {group: inner})
        except Exception as error:
            failed = _why_not(place, _root(error), sealed)
        raise_on_all(failed)
    return loaded


def _why_not(place: Path, root: BaseException, sealed: bool) -> UserError:
    """Return the exception for a checkpoint at `place` that does not load because of `root`.

    TensorStore raises one type for all that goes wrong, so nothing is read from its words: a manifest that holds has
    proven the files, and a file that cannot be read is found by reading all of them. Any other error is `Doubtful`.
    """
    what = f"cannot be read ({type(root).__name__}: {first_line(root)})"
    words = f"{place} {what} on {socket.gethostname()}"
    if sealed:
        return Unreadable(words)
    return _tried(lambda: manifest.read_all(place))[1] or Doubtful(words)


def quieten_orbax() -> None:
    """Drop Orbax's own log of an error, a thousand lines long: Orbax raises the error as well."""
    # When a load fails, reads that were not begun are dropped, and the others end after their event loop.
    warnings.filterwarnings("ignore", r"coroutine '\w+' was never awaited", RuntimeWarning)
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
    """Pass what was raised where nobody can catch it on to `hook`, but for a read that ends after its event loop."""
    if str(raised.exc_value) != "Event loop is closed":
        hook(raised)


def fault_of_older(place: Path) -> str | None:
    """Return why a checkpoint that nobody loads now is damaged, as far as names, sizes and metadata tell.

    Orbax parses the metadata of every step when it opens the folder, and raises for one that it cannot parse. None: it
    is whole, or a file cannot be read, which proves nothing.
    """

    def look() -> None:
        manifest.check(place, contents=False)
        metadata(place)
        check_stores(place)
        try:
            deserialize(json.loads(read_regular(place / METADATA)))
        except (ValueError, TypeError) as error:
            raise Damaged(f"{METADATA} cannot be parsed ({error})") from None

    _, fault = _tried(look)
    return str(fault) if isinstance(fault, Damaged) else None


def newest[Found](
    steps: Sequence[int], take: Callable[[int], Found], damaged: Callable[[int, str], None]
) -> tuple[int, Found] | None:
    """Return the newest of `steps` (ascending) that is unchanged, and `take` of it; None if all are damaged.

    Whether a `Doubtful` checkpoint or a host is at fault is found by experiment: an older one is loaded on the same
    hosts, and if it loads, the doubtful one again. One that fails twice is damaged. `damaged` gets the step and the
    reason of each that is.

    Raises `Unreadable` where `take` does, or where there are doubtful ones and no older one loads.
    """
    doubtful: dict[int, str] = {}

    def attempt(step: int) -> list[Found]:
        try:
            return [take(step)]
        except Damaged as error:
            doubtful.pop(step, None)
            damaged(step, str(error))
        except Doubtful as error:
            doubtful[step] = str(error)
        gc.collect()  # What Orbax raised holds the arrays that were read before.
        return []

    for step in reversed(steps):
        found = attempt(step)
        if found and not doubtful:
            return step, found[0]
        if found:
            found.clear()  # Two may not fit into memory.
            for other in list(doubtful):
                if again := attempt(other):
                    return other, again[0]
                if other in doubtful:
                    damaged(other, doubtful.pop(other))
            return newest([one for one in steps if one <= step], take, damaged)
    if doubtful:
        raise Unreadable(
            f"{next(iter(doubtful.values()))}; no older checkpoint loads here, so a host may be at fault. Nothing was "
            "renamed; if other hosts say the same, rename it by hand, or start anew with checkpoint.resume=never"
        )
    return None


def _root(error: BaseException) -> BaseException:
    """Return the first cause of an exception, which Orbax wraps in another message."""
    while True:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            return error
        error = cause


def _await(path: Path) -> None:
    """Wait until this process sees `path`, which process 0 has seen. Raises `FileNotFoundError` after `LOOK_S`."""
    until = time.monotonic() + LOOK_S
    while True:
        # A listing asks an NFS server anew where a name that was not there is remembered.
        if path.name in os.listdir(path.parent) if path.parent.is_dir() else False:
            return
        if time.monotonic() >= until:
            raise FileNotFoundError(errno.ENOENT, "process 0 sees it, this one does not", str(path))
        time.sleep(1.0)


def cast[Tree](tree: Tree, like: Tree) -> Tree:
    """Cast arrays to the types of `like`: a run may be allowed to change them."""
    return jax.tree.map(lambda x, s: x if x.dtype == s.dtype else x.astype(s.dtype), tree, like)


def first_line(error: BaseException) -> str:
    """Return an error's message without TensorStore's list of all its settings."""
    return next(iter(str(error).splitlines()), "").partition(" [tensorstore_spec")[0][:LONGEST]


def entries(meta: dict) -> dict[str, tuple]:
    """Return type, shape and fingerprint by array. Raises `Damaged` if malformed."""
    try:
        return {
            name: (jnp.dtype(dtype), tuple(map(int, shape)), str(mark))
            for name, (dtype, shape, mark) in meta["arrays"].items()
        }
    except (TypeError, ValueError) as error:
        raise Damaged(f"the list of arrays cannot be read ({error})") from None


def misfits(known: Mapping[str, tuple], shapes: Groups) -> list[str]:
    """Return, one a line, the arrays that a checkpoint holds in another shape than `shapes`, or not at all."""
    wanted = {name: tuple(s.shape) for name, s in named(shapes).items()}
    saved = {name: shape for name, (_, shape, _) in known.items() if name.split("/")[0] in shapes}
    return [
        f"{name}: saved {saved.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}"
        for name in sorted(saved | wanted)
        if saved.get(name) != wanted.get(name)
    ]


def _check_form(known: Mapping[str, tuple], shapes: Groups) -> None:
    changes = misfits(known, shapes)
    if changes:
        more = [f"and {len(changes) - 8} more"] if len(changes) > 8 else []
        raise UserError(
            "the checkpoint holds other arrays than this run has:\n  "
            + "\n  ".join(changes[:8] + more)
            + "\nno option makes them fit; put the model and the optimizer back, or choose another --log.run-dir"
        )


def _different(known: Mapping[str, tuple], loaded: Groups) -> str | None:
    """Name the arrays that have changed since they were saved; None if there are none."""
    marks = fingerprints(named(loaded))
    wrong = [name for name, mark in marks.items() if mark != known[name][2]]
    more = f", nor are {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return agree(f"array {wrong[0]} is not what was saved (fingerprint){more}" if wrong else None)
