"""Every link inside the repository leads somewhere: to a file, and to a heading of it."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = MarkdownIt("commonmark").enable("table")


def flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flat(token.children or [])


@cache
def parsed(page: Path) -> list[Token]:
    return list(flat(MARKDOWN.parse(page.read_text(encoding="utf-8"))))


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links and images, but for those of other sites."""
    for token in parsed(page):
        target = token.attrs.get({"link_open": "href", "image": "src"}.get(token.type, ""))
        if target and not urlsplit(str(target)).scheme:
            yield str(target)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    tokens = parsed(page)
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            text = "".join(t.content for t in token.children or [])
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in found.items() for n in range(last + 1)}


def leads_nowhere(page: Path, target: str) -> bool:
    path, _, anchor = unquote(target).partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return True
    return bool(anchor) and file.suffix == ".md" and anchor not in anchors(file)


def test_every_link_of_the_pages_leads_somewhere():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
    found = [(page, target) for page in PAGES for target in links(page)]
    assert len(found) > 150
    broken = [(page, target) for page, target in found if leads_nowhere(page, target)]
    assert [f"{page.relative_to(ROOT)}: {target}" for page, target in broken] == []
