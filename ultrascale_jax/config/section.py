"""Sections of a configuration, whose fields are checked against their types and bounds when one is made.

A bound is in the annotation: `steps: Annotated[int, at_least(1)] = 100`, or `steps: Count = 100`.
"""

import ast
import functools
import inspect
import itertools
import operator
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

from ultrascale_jax.config.base import FLOATS, LARGEST, UserError, in_float32, require, shown

type Test = Callable[[Any], bool]


class Bound(NamedTuple):
    """A condition on a number, or on each in a tuple, and the fix for one that breaks it."""

    holds: Test
    fix: str

    def __repr__(self) -> str:
        """Return what `help` of a section shows in the types of its fields, as `at least 1`."""
        return self.fix.removeprefix("must be ").replace("must not be", "not")


def at_least(least: float) -> Bound:
    """Bound a number from below."""
    fix = f"must be at least {least}" if least else "must not be negative"
    return Bound(lambda value: value >= least, fix)


def between(least: float, most: float) -> Bound:
    """Bound a number from both sides; the bounds themselves are allowed."""
    return Bound(lambda value: least <= value <= most, f"must be from {least} to {most}")


def below(end: float) -> Bound:
    """Bound a number from above; the bound itself is not allowed."""
    return Bound(lambda value: value < end, f"must be less than {end}")


POSITIVE = Bound(lambda value: value > 0, "must be positive")

EVEN = Bound(lambda value: value % 2 == 0, "must be even")

INT32 = Bound(lambda value: abs(value) <= LARGEST, f"must be at most {LARGEST} in size")

FLOAT32 = Bound(in_float32, f"must be 0, or of a size from {FLOATS[0]:.1e} to {FLOATS[1]:.1e}")

Count = Annotated[int, at_least(1)]
"""A number of things of which there is at least one."""

Natural = Annotated[int, at_least(0)]
"""A number of things; 0 has no effect, or means a default."""

NonNegative = Annotated[float, at_least(0)]
"""A number that is not negative; 0 has no effect, or means a default."""

Positive = Annotated[float, POSITIVE]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the parts of a configuration: `class OptimConfig(Section, name="optim")`."""

    _name: ClassVar[str] = ""

    def __init_subclass__(cls, name: str | None = None):
        if name is not None:
            cls._name = name

    def __post_init__(self):
        """Check each field by itself; a section with more to check extends it."""
        check_fields(self._name, self)

    def require(self, holds: bool, field: str, fix: str) -> None:
        """Refuse the value of a field, with the fix, unless `holds`; it may be a field of a part, `experts.num`."""
        if not holds:
            self.refuse(field, fix)

    def require_switch(self, switch: str) -> None:
        """Refuse a field that is set while the field `switch` is 0, which turns the section off."""
        for field in () if getattr(self, switch) else fields(self):
            fix = f"has no effect without {self._name}.{switch}; give both"
            self.require(getattr(self, field.name) == field.default, field.name, fix)

    def refuse(self, field: str, fix: str) -> NoReturn:
        """Raise a `UserError` that names a field, its value and the fix."""
        refuse(self._name, field, operator.attrgetter(field)(self), fix)


def switch(option: str, on: bool) -> str:
    """Return the word of the command line that sets a field that is a switch: `--moe.folding`, `--moe.no-folding`."""
    section, _, name = option.rpartition(".")
    return option if on else f"{section}.no-{name}"


def refuse(section: str, field: str, value: object, fix: str) -> NoReturn:
    """Raise a `UserError` that names a field after its section, its value and the fix."""
    raise UserError(f"{section}.{field}={shown(value)}: {fix}".removeprefix("."))


def check_fields(section: str, values: Any) -> None:
    """Check each field of the dataclass `values`: its type, its bounds, and that the devices can hold its numbers.

    Sections inside it have checked themselves. Raises `UserError` that names the field, after `section` if that is not
    empty, its value and the fix.
    """
    for field in _declared(type(values)):
        value = getattr(values, field.name)
        key = (type(value), value) if isinstance(value, PLAIN) else None
        if key in field.accepted:
            continue
        if not field.fits(value):
            refuse(section, field.name, value, f"must be {field.words}")
        for number in _numbers(value) if isinstance(value, (int, float, tuple)) else ():
            for bound in (*field.bounds, INT32 if isinstance(number, int) else FLOAT32):
                if not bound.holds(number):
                    refuse(section, field.name, value, bound.fix)
        if key is not None:
            field.accepted.add(key)


def require_choice(name: str, value: object, kind: Any) -> None:
    """Refuse a value that `kind`, a `Literal`, does not list."""
    fits, words = _type_of(kind)
    require(fits(value), name, value, f"must be {words}")


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers of a value: itself, or the members of a tuple, or of tuples in it."""
    if isinstance(value, tuple):
        for member in value:
            yield from _numbers(member)
    elif isinstance(value, (int, float)):
        yield value


class _Field(NamedTuple):
    """A field as its annotation declares it."""

    name: str
    fits: Test
    words: str
    bounds: tuple[Bound, ...]
    accepted: set[tuple[type, Any]]
    """Plain values that have passed, with their types: a search builds configurations by the ten thousand."""


@functools.cache
def _declared(kind: type) -> tuple[_Field, ...]:
    """Return the fields of a dataclass; choices among words come first, as they are misspelt most."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]
    names.sort(key=lambda name: typing.get_origin(hints[name]) is not Literal)
    return tuple(
        _Field(name, *_type_of(hints[name]), tuple(_bounds_of(hints[name])), set())
        for name in names
    )


@functools.cache
def texts_of(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, in one line."""
    [body] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


PLAIN = (int, float, str, types.NoneType)
"""Types of values that are compared at once."""

UNIONS = (typing.Union, types.UnionType)

KINDS = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((float, int), "a number"),
    str: (str, "a text"),
    types.NoneType: (types.NoneType, "none"),
}
"""Types of a value for the type of a field, and the words for it; `True` is no number."""


def _bounds_of(hint: Any) -> Iterator[Bound]:
    """Yield the bounds of an annotation; the bounds of one member of a tuple are for all members."""
    if typing.get_origin(hint) is Annotated:
        yield from _bounds_of(hint.__origin__)
        yield from (extra for extra in hint.__metadata__ if isinstance(extra, Bound))
    elif typing.get_origin(hint) in (*UNIONS, tuple):
        for part in typing.get_args(hint):
            yield from _bounds_of(part)


def _type_of(hint: Any) -> tuple[Test, str]:
    """Return the test of whether a value is of a type, and the words for it."""
    hint = getattr(hint, "__value__", hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_of(hint.__origin__)
    if origin is Literal:
        words = f"one of {', '.join(map(str, parts))}"
        return lambda value: any(type(value) is type(p) and value == p for p in parts), words
    if origin in UNIONS:
        tests, texts = zip(*map(_type_of, parts), strict=True)
        return lambda value: any(test(value) for test in tests), " or ".join(texts)
    if origin is tuple:
        return _tuple_of(parts)
    kinds, words = KINDS.get(hint, (origin or hint, ""))
    if hint in (int, float):
        return lambda value: isinstance(value, kinds) and not isinstance(value, bool), words
    return lambda value: isinstance(value, kinds), words or f"of type {hint.__name__}"


def _tuple_of(parts: tuple[Any, ...]) -> tuple[Test, str]:
    """Return test and words of a tuple: of one type and `...`, or of a type for each member."""
    many = parts[-1] is ...
    tests, texts = zip(*(_type_of(part) for part in parts if part is not ...), strict=True)
    words = f"a tuple (in JSON a list){', each' if many else ' of'} {', '.join(texts)}"

    def fits(value: Any) -> bool:
        if not isinstance(value, tuple) or not (many or len(value) == len(tests)):
            return False
        expected = tests * len(value) if many else tests
        return all(test(member) for test, member in zip(expected, value, strict=True))

    return fits, words
