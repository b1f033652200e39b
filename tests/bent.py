"""Input that somebody else wrote: how it is bent, and what may not happen while it is read.

An audit hook sees what the interpreter does: code that is run, a pickle that is opened, a process that is started, a
file that is written outside the folder of the test. No YAML is read anywhere, so there are no alias bombs and no tags.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import jax
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ultrascale_jax.config import UserError

EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
CHANGES = tuple(f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "symlink", "link"))

BOUNDED = settings(
    max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "25")),
    # A bound on a hang, not a speed.
    deadline=timedelta(seconds=300),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_seen: list[str] | None = None
_inside: list[str] = []


def _audit(event: str, args: tuple) -> None:
    if _seen is None:
        return
    if event in EXECUTES:
        _seen.append(f"{event} {args[:1]}")
    elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        flags = args[2] if isinstance(args[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _outside(event, args[0])
    elif event in CHANGES:
        _outside(event, args[0])


def _outside(event: str, path: object) -> None:
    where = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
    allowed = (
        any(where.startswith(folder) for folder in (*_inside, "/dev/")) or "__pycache__" in where
    )
    if not allowed and _seen is not None:
        _seen.append(f"{event} {where}")


sys.addaudithook(_audit)


@contextmanager
def harmless(folder: Path) -> Iterator[None]:
    """Inside, nothing is executed, nothing is written outside `folder`, and all that is raised is a `UserError`."""
    global _seen
    # What JAX has compiled it may keep.
    cache = jax.config.jax_compilation_cache_dir
    _inside[:], _seen = [str(folder.resolve()), *filter(None, [cache])], []
    try:
        yield
    except UserError as error:
        assert str(error).strip(), "an error without a word"
    finally:
        found, _seen = _seen, None
    assert not found, found


numbers = st.one_of(
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**30, True]),
    st.floats(),
)
EVIL = ("", "..", "../../x", "/etc/passwd", "a\0b", "\ud800", "!!python/object/apply:os.system [1]")
texts = st.one_of(st.text(max_size=20), st.sampled_from(EVIL))
anything = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def _places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values inside a JSON value."""
    yield path
    items = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else items:
        yield from _places(inner, (*path, key))


@st.composite
def bent(draw, value):
    """A JSON value in which one to three parts are missing, replaced or new."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(value))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(anything)
            if isinstance(value, dict):
                value[draw(texts)] = draw(anything)
            continue
        *outer, last = path
        holder = value
        for key in outer:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(anything)
        else:
            del holder[last]
    return value


@st.composite
def bent_text(draw, value):
    """The text of a bent JSON value, or a cut, altered or wrapped one of the value itself."""
    kind = draw(st.sampled_from(["value", "value", "bytes", "deep"]))
    if kind == "value":
        return json.dumps(draw(bent(value))).encode("utf-8", "surrogatepass")
    if kind == "deep":
        return b"[" * draw(st.sampled_from([100, 100_000])) + json.dumps(value).encode()
    return draw(bent_bytes(json.dumps(value).encode()))


@st.composite
def bent_bytes(draw, content: bytes):
    """Bytes of which some are other ones, missing or new."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = draw(st.binary(max_size=9))
        else:
            content[at : at + 16] = bytes(len(content[at : at + 16]))
    return bytes(content)
