"""Figures from what the verbs of `ultrascale plan` wrote: JSON of one verb, or CSV of runs."""

import dataclasses
import hashlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.foreign import parse_json, read_foreign, utf8
from ultrascale_jax.figures.charts import Areas, Bar, Bars, Cloud, Clouds, Point
from ultrascale_jax.figures.figure import Figure, Table
from ultrascale_jax.figures.palette import WHOLE
from ultrascale_jax.figures.streams import Streams, events_of, side_by_side
from ultrascale_jax.plan.report import runs
from ultrascale_jax.units import GIB

NEAR = 1.5
"""Candidates of a search are drawn up to so many times the memory that there is."""

RUNS = "runs"
"""The verb of a CSV of runs, which no verb writes."""

WORK = {"gemm": "matrix products", "attention": "attention", "other": "all other work"}
"""The kinds of work of the verb `compile`, in words."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file."""

    path: str
    verb: str
    content: Any
    """The JSON object, or the rows of the CSV."""
    digest: str
    """First digits of its SHA-256."""


def usable(gib: float, where: str = "") -> dict[str, Any]:
    """Return the line of what a run may take of a GPU's memory."""
    return {"limit": gib, "limit_name": f"usable{where}: {gib:.0f} GiB"}


def _each(make: Callable[[dict[str, Any], str], list[Figure]]) -> "Reader":
    """Return the figures of one file after the other; where there are several, numbered from 1."""

    def read(sources: Sequence[Source]) -> list[Figure]:
        tails = [f"_{n}" for n in range(1, len(sources) + 1)] if len(sources) > 1 else [""]
        made = (make(s.content, tail) for s, tail in zip(sources, tails, strict=True))
        return [figure for figures in made for figure in figures]

    return read


def _memory(sources: Sequence[Source]) -> list[Figure]:
    return memory([source.content for source in sources])


def memory(contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """Draw the memory of one GPU from objects as the verb `memory` prints them; one alone is one figure."""
    several = len(contents) > 1
    width = min(18, max(8, 64 // len(contents)))
    peaks, moments = [], {}
    for content in contents:
        parts = {name: size / GIB for name, size in content["parts"].items() if size}
        peaks.append(Bar(label=wrap(content["label"], width), parts=parts))
        title = content["label"] if several else "through two steps"
        moments[title] = [
            Bar(label=wrap(name, 12), parts={WHOLE: size / GIB})
            for name, size in content["timeline"]
        ]
    usable_gib = min(content["usable_bytes"] for content in contents) / GIB
    gpus = "/".join(sorted({content["gpu"] for content in contents}))
    peak = Bars(
        name="memory",
        title=f"Memory of one GPU ({gpus})",
        caption="By formulas: what one GPU holds at the peak of a step, part by part.",
        panels={"" if several else "at the peak, by part": peaks},
        unit="GiB",
        x="",
        **usable(usable_gib),
    )
    through = "By formulas: what one GPU holds through two optimizer steps."
    if not several:
        caption = "By formulas: what one GPU holds at the peak of a step, and through two optimizer steps."
        return [dataclasses.replace(peak, panels={**peak.panels, **moments}, caption=caption)]
    title = f"Memory of one GPU through two steps ({gpus})"
    return [
        peak,
        dataclasses.replace(
            peak, name="memory_moments", title=title, caption=through, panels=moments
        ),
    ]


def _compile(content: dict[str, Any], tail: str) -> list[Figure]:
    where = f"{content['label']} on {content['gpus']} {content['gpu']}"
    found = [_streams(content, f"timeline{tail}", where)]
    exposed = content["exposed_s"]
    parts = {WORK.get(kind, kind): s for kind, s in content["busy_s"].items()}
    parts |= {f"waiting for {axes}": s for axes, s in exposed.items() if s}
    if (copies := content["idle_s"] - sum(exposed.values())) > 0:
        parts["waiting for copies"] = copies
    step_parts = Bars(
        name=f"step_parts{tail}",
        title=f"Where the step goes: {where}",
        caption="One step on one GPU: computing by kind of work, and waiting for communication by mesh axes.",
        panels={"": [Bar(label="step", parts=parts)]},
        unit="seconds",
        x="",
    )
    found += [step_parts, _compiled(content, f"compiled_memory{tail}", where)]
    if content["memory_over_step"]["start_s"]:
        found.append(_memory_over_step(content, f"memory_over_step{tail}", where))
    if rows := content["collectives"]:
        found.append(_collectives(rows, f"collectives{tail}", where))
    return found


def _compiled_steps(sources: Sequence[Source]) -> list[Figure]:
    """Draw each compiled step, and the timelines of several below each other."""
    found = _each(_compile)(sources)
    if len(sources) == 1:
        return found
    steps = {str(n): _streams(source.content, "", "") for n, source in enumerate(sources, 1)}
    labels = "; ".join(f"{n}: {source.content['label']}" for n, source in enumerate(sources, 1))
    caption = f"The part of each step that its timeline shows operation by operation, from its start on. {labels}."
    return [*found, side_by_side("timelines", "Operation by operation", caption, steps)]


def _streams(content: dict[str, Any], name: str, where: str) -> Streams:
    streams = events_of(content["timeline"]["streams"])
    ends = [e.end for events in streams.values() for e in events]
    return Streams(
        name=name,
        title=f"One step: {where}",
        caption="The scheduled program of XLA, timed operation by operation by plan/compiled/timeline.py. "
        f"Step {1e3 * content['step_s']:.1f} ms, {content['tokens_per_s_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {100 * content['mfu']:.1f}%.",
        streams=streams,
        step_s=max([1e-9, content["step_s"], *ends]),
    )


def _compiled(content: dict[str, Any], name: str, where: str) -> Figure:
    arguments, peak = content["argument_bytes"] / GIB, content["peak_bytes"] / GIB
    parts = {"state and batch": arguments, "everything else": peak - arguments}
    usable_gib = content["usable_bytes"] / GIB
    return Bars(
        name=name,
        title=f"Memory of the compiled step: {where}",
        caption="XLA's own buffer assignment for one GPU: the step's arguments, and what it adds at its peak.",
        panels={"": [Bar(label="peak", parts=parts)]},
        unit="GiB",
        x="",
        **usable(usable_gib),
    )


def _memory_over_step(content: dict[str, Any], name: str, where: str) -> Figure:
    held = content["memory_over_step"]
    parts = {kind: [size / GIB for size in row] for kind, row in held["bytes"].items()}
    return Areas(
        name=name,
        title=f"Memory over one step: {where}",
        caption="The buffers of XLA's own plan that are in use, by what they hold, along the simulated step. "
        "Iterations of a loop that are not shown one by one hold what the loop holds at its fullest.",
        starts=[1e3 * start for start in held["start_s"]],
        end=1e3 * content["step_s"],
        parts=parts,
        x="ms",
        unit="GiB",
        **usable(content["usable_bytes"] / GIB),
    )


def _collectives(rows: Sequence[dict[str, Any]], name: str, where: str) -> Figure:
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        bars.setdefault(row["axes"] or "none", {})[row["kind"]] = row["bytes"] / GIB
    return Bars(
        name=name,
        title=f"Communication of one step: {where}",
        caption="Bytes that one GPU sends or receives (the larger side of each collective), by mesh axes.",
        panels={"": [Bar(label=axes, parts=parts) for axes, parts in bars.items()]},
        unit="GiB a step",
        x="mesh axes",
    )


def _search(content: dict[str, Any], tail: str) -> list[Figure]:
    groups: dict[str, list[Point]] = {}
    for row in content["rows"]:
        if row["peak_gib"] <= NEAR * content["usable_gib"]:
            solid = row["source"] == "compiled"
            point = Point(x=row["peak_gib"], y=row["tokens_per_s_gpu"], solid=solid)
            groups.setdefault(f"recompute {row['remat']}", []).append(point)
    axes = {"x": "peak memory of one GPU (GiB)", "y": "tokens/s/GPU"}
    cloud = Cloud(**axes, groups=groups, **usable(content["usable_gib"]))
    figure = Clouds(
        name=f"search{tail}",
        title=f"Candidates: {content['label']}",
        caption=f"{content['answer']}. What needs more than {NEAR} times the memory is in the table only.",
        hollow="by formulas; filled: compiled",
        panels={"": cloud},
        sheet=_ranking(content["rows"]),
    )
    return [figure]


def _ranking(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the candidates in the order of the search, with the reason why each lost."""
    columns = ("peak_gib", "step_s", "tokens_per_s_gpu", "mfu", "source", "verdict")
    body = [(row["label"], *(row[c] for c in columns)) for row in rows]
    head = ("configuration", "GiB", "step (s)", "tokens/s/GPU", "MFU", "from", "verdict")
    return Table(head=head, rows=tuple(body))


def _runs(sources: Sequence[Source]) -> list[Figure]:
    paths = ", ".join(Path(source.path).name for source in sources)
    return runs.figures([row for source in sources for row in source.content], paths)


def wrap(text: str, width: int = 16) -> str:
    """Break `text` into lines for a place under an axis."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))


type Reader = Callable[[Sequence[Source]], list[Figure]]
"""Figures of the files of one verb."""

READERS: dict[str, Reader] = {
    "memory": _memory,
    "compile": _compiled_steps,
    "search": _each(_search),
}
"""Verb to reader."""


def read(path: str) -> Source:
    """Read the JSON of a verb, or a CSV of runs.

    Raises:
      UserError: the file is missing or empty, of another type, or lacks a field; names file and field.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    require(suffix in (".json", ".csv"), "file", path, "give a .json or .csv file, or a recipe")
    data = read_foreign(file, name="file", most=1 << 28)
    digest = hashlib.sha256(data).hexdigest()[:12]
    try:
        text = utf8(data)
    except UserError as error:
        raise UserError(f"file={path!r}: {error}") from None
    require(text.strip() != "", "file", path, "is empty")
    if suffix == ".csv":
        return Source(path=path, verb=RUNS, content=runs.read(path, text), digest=digest)
    content = parse_json(text, f"file={path!r}:")
    fix = (
        f"has no field 'verb'; write it by `ultrascale plan VERB --json`, VERB {', '.join(READERS)}"
    )
    require(isinstance(content, dict) and "verb" in content, "file", path, fix)
    verb = content["verb"]
    fix = f"verb={verb!r} has no figures; those of {', '.join(READERS)} have"
    require(verb in READERS, "file", path, fix)
    return Source(path=path, verb=verb, content=content, digest=digest)


def figures(sources: Sequence[Source]) -> list[Figure]:
    """Draw all figures of `sources`, files of one verb together.

    Raises:
      UserError: a file lacks a field; names both.
    """
    found: list[Figure] = []
    for verb, make in {**READERS, RUNS: _runs}.items():
        if mine := [source for source in sources if source.verb == verb]:
            try:
                made = make(mine)
                if not all(figure.table().rows for figure in made):
                    raise ValueError("there is nothing to show")
                found += made
            except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
                if isinstance(error, UserError):
                    raise
                paths = ", ".join(source.path for source in mine)
                what = f"lacks the field {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"file={paths!r}: not what `{verb}` writes: {what}") from None
    return found
