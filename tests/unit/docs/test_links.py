"""Links of the pages outside `docs/` lead to a file, and to a heading of it; `make docs` checks those of the site."""

import re
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[3]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_every_link_leads_somewhere():
    links = [
        (page, target)
        for page in ROOT.glob("*.md")
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not urlsplit(target).scheme
    ]
    assert len(links) > 50
    for page, target in links:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), (page.name, target)
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), (page.name, target)
