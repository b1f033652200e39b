"""Mixtures of sources: the text of `data.source`, and which sample of which source each sequence of a run is.

    tokens:web@0.9,tokens:code@0.1; 0.8: tokens:web@0.5,tokens:math@0.5

A source has one order of samples for the full run. A later stage continues it where the previous one stopped, so no
sample comes twice before its source is exhausted. A stage's samples depend on it and on those before it alone.
"""

import bisect
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale_jax.config import require
from ultrascale_jax.data.stages import FORM, parse_stages

KINDS = "python-stdlib, text:GLOB, tokens:DIR or synthetic"

WEIGHT = re.compile(r"@([-+.\w]+)$")
"""The end of a source with a weight."""

KIND = "(?:python-stdlib|synthetic|text:|tokens:|hf:)"
"""Regular expression of the beginning of a source, or of a text that looks like one."""

NEXT = re.compile(rf",\s*(?={KIND})")
"""Border of two sources; another comma is a part of a path."""

LOST_STAGE = re.compile(f";.*{KIND}")
"""Text inside a name if a stage was not written as one."""


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, and their shares in each stage."""

    names: tuple[str, ...]
    """Sources in the order in which the text first names them."""
    weights: tuple[tuple[float, ...], ...]
    """Share of each source in each stage, 0 if it is not in it; the sum of a stage is 1."""

    @classmethod
    def parse(cls, source: str) -> "Mixture":
        """Read `data.source`; raises `UserError` for a text of another form."""
        stages = [_numbered(parse_mixture(s.text)) for s in parse_stages("data.source", source)]
        sources = list(dict.fromkeys(key for stage in stages for key in stage))
        weights = []
        for stage in stages:
            total = sum(stage.values())
            weights.append(tuple(stage.get(key, 0.0) / total for key in sources))
        return cls(tuple(name for name, _ in sources), tuple(weights))

    def known_by(self, stage: int) -> int:
        """Return how many of the first sources the stages up to `stage` have."""
        used = [i for weights in self.weights[: stage + 1] for i, w in enumerate(weights) if w]
        return max(used) + 1


def parse_mixture(source: str) -> list[tuple[str, float]]:
    """Parse `a@0.7,b@0.3` into names and weights; a comma parts sources only before the name of a kind."""
    mixture = []
    for part in NEXT.split(source):
        name, weight = _weighted(part.strip(), source)
        kind, _, argument = name.partition(":")
        is_source = name in ("python-stdlib", "synthetic") or (
            kind in ("text", "tokens") and bool(argument)
        )
        command = "ultrascale prepare-data --input 'hf://datasets/OWNER/NAME/*.parquet' --out DIR"
        fix = f"a run reads token shards; make them: {command}, then tokens:DIR"
        require(not name.startswith("hf:"), "data.source", source, fix)
        require(LOST_STAGE.search(name) is None, "data.source", source, FORM)
        require(is_source, "data.source", source, f"{name!r} is no source; write {KINDS}")
        fix = f"the weight of {name!r} must be a positive number"
        require(weight > 0 and math.isfinite(weight), "data.source", source, fix)
        mixture.append((name, weight))
    return mixture


def _weighted(part: str, source: str) -> tuple[str, float]:
    """Return the name and the weight of one source; a file whose name is the full text has no weight.

    Raises `UserError` where the name without the weight exists too.
    """
    match = WEIGHT.search(part)
    try:
        name, weight = (part[: match.start()], float(match[1])) if match else (part, 1.0)
    except ValueError:
        return part, 1.0  # an @ inside a path
    whole, without = (os.path.exists(text.partition(":")[2]) for text in (part, name))
    if match and whole:
        fix = f"{part} and {name} exist both; write {part}@1 or {name}@{weight:#.6g}"
        require(not without, "data.source", source, fix)
        return part, 1.0
    return name, weight


def source_of(place: str) -> str:
    """Return the source of the token shards at `place`, so that a part of its name is not read as a weight."""
    return f"tokens:{place}@1" if WEIGHT.search(place) else f"tokens:{place}"


def parse_named(source: str) -> dict[str, str]:
    """Parse `web=text:a,code=tokens:b` into mixtures by name; a text without names is one mixture, whose name is empty.

    Raises `UserError` for a name that is missing or given twice.
    """
    named: dict[str, str] = {}
    for part in re.split(rf",\s*(?=[\w.-]+={KIND})", source.strip()):
        match = re.fullmatch(rf"([\w.-]+)=({KIND}.*)", part)
        name, mixture = (match[1], match[2]) if match else ("", part)
        fix = f"there are two of {name!r}; give each source a name of its own"
        require(name not in named, "data.eval_source", source, fix)
        fix = "evaluations are of one mixture during the run; give one without stages"
        require(
            len(parse_stages("data.eval_source", mixture)) == 1, "data.eval_source", source, fix
        )
        named[name] = mixture
    fix = "name all sources, NAME=SOURCE, or none"
    require("" not in named or len(named) == 1, "data.eval_source", source, fix)
    return named


def _numbered(mixture: list[tuple[str, float]]) -> dict[tuple[str, int], float]:
    """Return the weights by name and number: a source that is named twice in a stage is two."""
    weights: dict[tuple[str, int], float] = {}
    for name, weight in mixture:
        number = sum(name == other for other, _ in weights)
        weights[name, number] = weight
    return weights


class StagedSamples:
    """The samples of a run by the number of the sequence: sources mixed by weight, stage after stage."""

    def __init__(self, weights: Sequence[Sequence[float]], begins: Sequence[int]):
        """Mix sources without end.

        Args:
          weights: share of each source in each stage, 0 if it is not in it.
          begins: number of the first sequence of each stage, from 0 up.
        """
        self._begins = tuple(begins)
        self._proportions = [_proportions(stage) for stage in weights]
        self._used = [(0,) * len(weights[0])]
        for stage, end in enumerate(self._begins[1:]):
            self._used.append(self._counts(stage, end))

    def place(self, number: int) -> tuple[int, int]:
        """Return source and sample of a sequence."""
        stage = self._stage(number)
        counts, next_counts = self._counts(stage, number), self._counts(stage, number + 1)
        source = next(i for i in range(len(counts)) if next_counts[i] != counts[i])
        return source, counts[source]

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` sequences each source gives."""
        return self._counts(self._stage(number), number)

    def _stage(self, number: int) -> int:
        return bisect.bisect_right(self._begins, number) - 1

    def _counts(self, stage: int, number: int) -> tuple[int, ...]:
        """As `counts`, where `number` is in the stage or at its end."""
        stage_counts = interleaved(self._proportions[stage], number - self._begins[stage])
        return tuple(
            used + count for used, count in zip(self._used[stage], stage_counts, strict=True)
        )


def interleaved(proportions: Sequence[int], number: int) -> list[int]:
    """Return how many of the first `number` elements each source gives where sources are interleaved evenly.

    One more element is one more of one source. Grain's `MapDataset.mix` has the same rule, and does not report it.
    """
    counts, left, remaining = [], number, sum(proportions)
    for proportion in proportions:
        remaining_elements = left * (remaining - proportion) // max(remaining, 1)
        counts.append(left - remaining_elements)
        left, remaining = remaining_elements, remaining - proportion
    return counts


def _proportions(weights: Sequence[float]) -> list[int]:
    """Return weights as integers, of which the least that is not 0 is 100, as Grain rounds them."""
    scale = 100 / min(weight for weight in weights if weight)
    return [int(weight * scale) for weight in weights]
