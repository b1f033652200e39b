"""The course: its blocks print what the pages say, and commands of the pages draw the figures."""

import re

import pytest

from scripts import course
from scripts.page_blocks import Command, matches, read_page

PAGES = course.find_pages()
COMMANDS = [
    (page, block) for page in PAGES for block in read_page(page) if isinstance(block, Command)
]
# A tenth of all commands, of the verb that needs no JAX.
CHEAP = [(page, c) for page, c in COMMANDS if c.words[:3] == ["ultrascale", "plan", "memory"]][
    : -(-len(COMMANDS) // 10)
]
WRITTEN = re.compile(rf"{course.DOCS}/\w+/{course.FIGURES}/([\w.]+)")
"""The name of a figure as a block of a page writes it, and only a block."""


@pytest.mark.parametrize(("page", "command"), CHEAP, ids=lambda value: getattr(value, "stem", None))
def test_a_command_prints_what_its_page_says(page, command, tmp_path):
    [(_, seen)] = course.outputs(page, [command], tmp_path)
    assert matches(command.output.lines, seen), "\n".join(seen)


def test_every_figure_is_there_is_small_and_is_shown_by_the_page_that_draws_it():
    figures = {page.parent / course.FIGURES for page in PAGES}
    kept = {path.name: path.stat().st_size for path in figures for path in path.glob("*")}
    shown = {page.name: course.shown(page) for page in PAGES}
    drawn = {page.name: set(WRITTEN.findall(page.read_text())) for page in PAGES}
    assert drawn == shown
    assert set(kept) == set().union(*shown.values())
    assert {name for name, size in kept.items() if size > 200_000} == set()
