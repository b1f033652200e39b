"""One HTML page of figures that needs nothing else: style, pictures, tables and the timeline's script are in it."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ultrascale_jax.figures.figure import Figure, Table, number

MAX_ROWS = 200
"""Rows of one table; the rest is counted."""

STYLE, SCRIPT = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """Text around the figures."""

    title: str
    subtitle: str
    facts: dict[str, str]
    command: str
    """The command line that makes the page again."""
    inputs: Sequence[str]
    """Files and recipes that it read."""
    versions: str


def render(page: Page, figures: Sequence[tuple[Figure, str]]) -> str:
    """Render the page; `figures` are figures with the result of `Figure.draw`."""
    links = "".join(
        f'<a href="#{f.name}">{html.escape(f.title.partition(":")[0])}</a>' for f, _ in figures
    )
    facts = "".join(
        f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>"
        for k, v in page.facts.items()
    )
    title, subtitle = html.escape(page.title), html.escape(page.subtitle)
    sections = "\n".join(_section(figure, svg) for figure, svg in figures)
    inputs = "".join(f"<li><code>{html.escape(line)}</code></li>" for line in page.inputs)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{STYLE}</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p>{f"<dl>{facts}</dl>" if facts else ""}</header>
<nav aria-label="Figures">{links}</nav>
<main>
{sections}
</main>
<footer>
<p>Made by <code>{html.escape(page.command)}</code></p>
<ul>{inputs}</ul>
<p>{html.escape(page.versions)}; the same command with the same inputs gives the same page.</p>
</footer>
<script>
{SCRIPT}</script>
</body>
</html>
"""


def _section(figure: Figure, svg: str) -> str:
    head, caption = html.escape(figure.title), html.escape(figure.caption)
    picture = figure.picture(svg, f"{head}: {caption}")
    return f"""<section id="{figure.name}">
<h2><a href="#{figure.name}">{head}</a></h2>
<figure>{picture}<figcaption>{caption}</figcaption></figure>
<details{' open class="all"' if figure.open else ""}><summary>The numbers</summary>{_table(figure.table())}</details>
</section>"""


def _table(table: Table) -> str:
    rows = table.rows[:MAX_ROWS]
    right = [bool(rows) and not isinstance(cell, str) for cell in (rows[0] if rows else table.head)]
    kind = [' class="n"' if r else "" for r in right]
    head = "".join(f"<th{k}>{html.escape(h)}</th>" for k, h in zip(kind, table.head, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{k}>{html.escape(number(c))}</td>" for k, c in zip(kind, row, strict=True))
        + "</tr>"
        for row in rows
    )
    left = len(table.rows) - len(rows)
    more = f"<p>{left:,} more rows are not shown.</p>" if left else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'
