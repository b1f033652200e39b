"""Every example of `docs/parts.md` runs alone, is short, and prints the text under it."""

from pathlib import Path

import pytest

from scripts.page_blocks import PythonBlock, read_page

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/parts.md"
LINES = PAGE.read_text().splitlines()
HEADINGS = [line.removeprefix("## ") for line in LINES if line.startswith("## ")]
MOST_LINES = 25
"""Lines of code of an example, without the blank ones that the formatter puts around a class."""


def examples() -> dict[str, PythonBlock]:
    """Return the examples of the page by the heading of their section."""
    by_heading = {}
    for block in read_page(PAGE):
        above = (line for line in reversed(LINES[: block.line]) if line.startswith("## "))
        by_heading[next(above).removeprefix("## ")] = block
    return by_heading


EXAMPLES = examples()


def test_every_section_has_one_short_example_with_its_output():
    assert HEADINGS == list(EXAMPLES) and len(read_page(PAGE)) == len(HEADINGS)
    assert all(block.output.lines for block in EXAMPLES.values())
    lengths = {name: sum(map(bool, block.source)) for name, block in EXAMPLES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_example_prints_its_text(heading, tmp_path, monkeypatch, capsys):
    block = EXAMPLES[heading]
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(block.source), f"docs/parts.md, {heading}", "exec"), {})
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in block.output.lines)
