"""The course: its blocks print what the pages say, and commands of the pages draw the figures."""

import re

import pytest

from scripts import course
from scripts.page_blocks import Command, matches, read_page
from tests import exercises

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


def test_an_exercise_is_red_with_its_hole_and_green_with_what_was_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(exercises, "FOLDER", tmp_path)
    exercise = exercises.exercises()["15_profiling"]
    assert [exercises.main([action, exercise.name]) for action in ("write", "try")] == [0, 1]
    assert exercise.sees in capsys.readouterr().out.partition("\nred\n")[2]
    exercise.path.write_text(exercise.path.read_text().replace(exercise.new, exercise.old))
    assert exercises.main(["try", exercise.name]) == 0
    assert "green: 1 passed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        exercises.main(["write", exercise.name])
    assert "remove it to begin anew" in capsys.readouterr().err
