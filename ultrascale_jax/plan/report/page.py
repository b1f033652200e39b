"""One HTML page of figures that needs nothing else: style, pictures, tables and the timeline's script are in it."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale_jax.plan.report.figures import Event, Figure, Streams, Table, number
from ultrascale_jax.plan.report.palette import INK, PAPER, kind_colours

MAX_ROWS = 200
"""Rows of one table; the rest is counted."""
FINEST = 50_000
"""Part of the step below which neighbours of a timeline are drawn together: the deepest zoom shows 1/5,000 of it."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #151b23; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header, main, footer, nav { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 32px; } h1 { margin: 0 0 4px; font-size: 28px; } header p { margin: 0; color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: 6px 18px; padding-top: 14px; padding-bottom: 14px; }
a { color: inherit; } nav a { color: var(--soft); font-size: 14px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  margin: 0 0 22px; padding: 18px 22px; }
h2 { margin: 0 0 8px; font-size: 19px; } h2 a { text-decoration: none; }
dl { display: flex; flex-wrap: wrap; gap: 12px 34px; margin: 16px 0 4px; }
dt { color: var(--soft); font-size: 13px; } dd { margin: 0; font-size: 21px; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; } figure > svg { width: 100%; min-width: 640px; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 14px; margin-top: 6px; }
details { margin-top: 10px; } summary { cursor: pointer; font-size: 14px; color: var(--soft); }
.scroll { overflow: auto; max-height: 480px; margin-top: 8px; }
details[open].all .scroll { max-height: none; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: var(--paper); }
td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
footer { color: var(--soft); font-size: 13px; padding-bottom: 40px; } footer code { overflow-wrap: anywhere; }
.streams { display: grid; grid-template-columns: max-content 1fr; gap: 0 12px; font-size: 13px; }
.streams .names { display: grid; } .streams .names span { align-self: center; }
.streams svg { width: 100%; display: block; background: var(--back); cursor: grab; touch-action: pan-y; }
.streams rect:hover { opacity: .6; }
.ticks { display: flex; justify-content: space-between; color: var(--soft); font-size: 12px; grid-column: 2; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin-top: 8px; }
.keys i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; border-radius: 2px; }
button { font: inherit; font-size: 13px; margin: 0 6px 8px 0; padding: 2px 10px; color: inherit;
  background: var(--back); border: 1px solid var(--line); border-radius: 6px; cursor: pointer; }
@media print { nav, button { display: none; } section { break-inside: avoid; } .scroll { max-height: none; } }
"""

SCRIPT = """
for (const box of document.querySelectorAll('.zoom')) {
  const svg = box.querySelector('svg'), ticks = box.querySelectorAll('.ticks span');
  const [, , full, height] = svg.getAttribute('viewBox').split(' ').map(Number), step = Number(box.dataset.ms);
  let from = 0, width = full;
  const show = () => {
    width = Math.min(full, Math.max(full / 5000, width));
    from = Math.min(full - width, Math.max(0, from));
    svg.setAttribute('viewBox', `${from} 0 ${width} ${height}`);
    const digits = Math.max(1, Math.ceil(2 - Math.log10(width / full * step)));
    ticks.forEach((tick, n) => {
      tick.textContent = ((from + width * n / (ticks.length - 1)) / full * step).toFixed(digits) + ' ms';
    });
  };
  const zoom = (factor, at) => { from += width * at * (1 - factor); width *= factor; show(); };
  const place = event => event.offsetX / svg.clientWidth;
  svg.addEventListener('wheel', event => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth);
  }, { passive: false });
  let last = null;
  svg.addEventListener('pointerdown', event => { last = event.clientX; });
  addEventListener('pointerup', () => { last = null; });
  addEventListener('pointermove', event => {
    if (last === null) return;
    from -= (event.clientX - last) / svg.clientWidth * width; last = event.clientX; show();
  });
  const moves = { in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), left: () => { from -= width / 2; show(); },
    right: () => { from += width / 2; show(); }, all: () => { from = 0; width = full; show(); },
    detail: () => { from = Number(box.dataset.from); width = Number(box.dataset.width); show(); } };
  for (const button of box.querySelectorAll('button')) button.onclick = moves[button.dataset.move];
}
"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What stands around the figures."""

    title: str
    subtitle: str
    facts: dict[str, str]
    """The most important numbers."""
    command: str
    """The command line that makes the page again."""
    inputs: Sequence[str]
    """Files and recipes that it read."""
    versions: str


def render(page: Page, figures: Sequence[tuple[Figure, str]]) -> str:
    """The page; `figures` are figures with what `draw.draw` returns."""
    links = "".join(
        f'<a href="#{f.name}">{_text(f.title.partition(":")[0])}</a>' for f, _ in figures
    )
    facts = "".join(
        f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in page.facts.items()
    )
    sections = "\n".join(_section(figure, svg) for figure, svg in figures)
    inputs = "".join(f"<li><code>{_text(line)}</code></li>" for line in page.inputs)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(page.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{_text(page.title)}</h1><p>{_text(page.subtitle)}</p>{f"<dl>{facts}</dl>" if facts else ""}</header>
<nav aria-label="Figures">{links}</nav>
<main>
{sections}
</main>
<footer>
<p>Made by <code>{_text(page.command)}</code></p>
<ul>{inputs}</ul>
<p>{_text(page.versions)}; the same command with the same inputs gives the same page.</p>
</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _text(value: str) -> str:
    return html.escape(value)


def _section(figure: Figure, svg: str) -> str:
    head, caption = _text(figure.title), _text(figure.caption)
    if isinstance(figure, Streams):
        picture = _zoom(figure)
    else:
        label = f'<svg role="img" aria-label="{head}: {caption}"'
        picture = inline(svg, figure.name).replace("<svg", label, 1)
    return f"""<section id="{figure.name}">
<h2><a href="#{figure.name}">{head}</a></h2>
<figure>{picture}<figcaption>{caption}</figcaption></figure>
<details{' open class="all"' if figure.open else ""}><summary>The numbers</summary>{_table(figure.table())}</details>
</section>"""


def _table(table: Table) -> str:
    rows = table.rows[:MAX_ROWS]
    right = [bool(rows) and not isinstance(cell, str) for cell in (rows[0] if rows else table.head)]
    kind = [' class="n"' if r else "" for r in right]
    head = "".join(f"<th{k}>{_text(h)}</th>" for k, h in zip(kind, table.head, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{k}>{_text(number(c))}</td>" for k, c in zip(kind, row, strict=True))
        + "</tr>"
        for row in rows
    )
    left = len(table.rows) - len(rows)
    more = f"<p>{left:,} more rows are not shown.</p>" if left else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def inline(svg: str, name: str) -> str:
    """matplotlib's SVG file as an element of a page: its own ids, the page's colours, nothing to load."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    width = re.search(r' width="([\d.]+)pt"', svg)
    assert width is not None
    limit = f' style="max-width: {1.5 * float(width[1]):.0f}px"'
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2).replace("<svg", f"<svg{limit}", 1)
    return svg.replace(INK, "currentColor").replace(PAPER, "var(--paper)").strip()


def merged(events: Sequence[Event], shortest: float) -> list[Event]:
    """`events` by start, neighbours of one kind that are shorter than `shortest` and touch drawn as one."""
    found: list[Event] = []
    counts: list[int] = []
    for event in sorted(events, key=lambda e: e.start):
        last = found[-1] if found else None
        near = last is not None and event.start - (last.start + last.duration) < shortest
        if (
            near
            and last is not None
            and last.kind == event.kind
            and event.duration < shortest > last.duration
        ):
            counts[-1] += 1
            end = max(last.start + last.duration, event.start + event.duration)
            name = f"{counts[-1]} short operations"
            found[-1] = Event(
                name=name, start=last.start, duration=end - last.start, kind=last.kind
            )
        else:
            found.append(event)
            counts.append(1)
    return found


def _zoom(figure: Streams) -> str:
    """The timeline as an SVG of 10,000 units for the step, which the script zooms; each operation has a tooltip."""
    scale, height = 1e4 / figure.step_s, 34
    kinds = list(dict.fromkeys(e.kind for events in figure.streams.values() for e in events))
    colours = kind_colours(kinds)
    bars = []
    for row, events in enumerate(figure.streams.values()):
        for e in merged(events, figure.step_s / FINEST):
            tip = f"{e.name} ({e.kind}): {1e3 * e.duration:.3g} ms from {1e3 * e.start:.4g} ms"
            bars.append(
                f'<rect x="{e.start * scale:.2f}" y="{row * height + 3}" width="{max(e.duration * scale, 0.3):.2f}" '
                f'height="{height - 6}" fill="{colours[e.kind]}"><title>{_text(tip)}</title></rect>'
            )
    total = height * len(figure.streams)
    names = "".join(f"<span>{_text(name)}</span>" for name in figure.streams)
    ticks = "".join(f"<span>{1e3 * figure.step_s * n / 6:.1f} ms</span>" for n in range(7))
    keys = "".join(f'<span><i style="background:{colours[k]}"></i>{_text(k)}</span>' for k in kinds)
    moves = [
        ("in", "zoom in"),
        ("out", "zoom out"),
        ("left", "←"),
        ("right", "→"),
        ("all", "whole step"),
    ]
    place = ""
    if figure.detail:
        start, end = (edge * scale for edge in figure.detail)
        place = f' data-from="{start:.4f}" data-width="{end - start:.4f}"'
        moves.append(("detail", "operation by operation"))
    buttons = "".join(f'<button type="button" data-move="{m}">{text}</button>' for m, text in moves)
    label = f"{_text(figure.title)}: {_text(figure.caption)}"
    return f"""<div class="zoom" data-ms="{1e3 * figure.step_s:.6g}"{place}>{buttons}
<div class="streams"><div class="names">{names}</div>
<svg role="img" aria-label="{label}" viewBox="0 0 10000 {total}" height="{total}"
 preserveAspectRatio="none">{"".join(bars)}</svg>
<div class="ticks">{ticks}</div></div><div class="keys">{keys}</div></div>"""
