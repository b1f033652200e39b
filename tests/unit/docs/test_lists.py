"""Pages that list everything of a kind list what there is."""

import re
import sys
from pathlib import Path

from tests import exercises
from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.main import COMMANDS
from ultrascale_jax.config import AXES, FP8, REMAT_POLICIES, SCHEDULES
from ultrascale_jax.launch import exit_codes

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def test_start_here_has_every_command():
    part = (DOCS / "start.md").read_text().partition("## Every command\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^ultrascale ([\w-]+)", part, re.MULTILINE)) == set(COMMANDS)


def test_the_table_of_recipes_has_every_recipe():
    page = (DOCS / "recipes.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", page, re.MULTILINE)  # four columns
    assert sorted(names) == sorted(command_line.recipes())


def test_the_glossary_explains_every_axis_schedule_and_policy():
    text = " ".join((DOCS / "course/glossary.md").read_text().lower().split())
    words = {*AXES, *SCHEDULES, *REMAT_POLICIES, *FP8, "bf16", "fp16", "fp32"}
    assert [word for word in words if not re.search(rf"\b{word}\b", text)] == []


def test_the_page_has_every_constant_with_its_text(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    from extensions.exit_codes import PLACE, add_codes

    source = [(ROOT / "docs/exit_codes.md").read_text()]
    assert source[0].count(PLACE) == 1
    add_codes(None, "exit_codes", source)
    constants = {name: value for name, value in vars(exit_codes).items() if name.isupper()}
    for name, value in constants.items():
        assert f"| {value} | `{name}` | " in source[0]
    assert "a restart cannot" in source[0] and PLACE not in source[0]


NOTHING = {"not found", "none"}
TRAINERS = ["MaxText", "torchtitan", "Megatron-Core, NeMo", "nanotron", "Levanter, Marin"]


def test_every_cell_about_another_trainer_has_a_source():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (DOCS / "comparison.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| |")
    ]
    others = [row for row in rows if row[0] != "**ultrascale_jax**"]
    trainers = [row[0] for row in others if row[0] != "JaxPP"]  # a library for pipelines
    assert trainers == TRAINERS * (len(rows) - len(others))
    without = [cell for row in others for cell in row[1:] if "](" not in cell and "][" not in cell]
    assert set(without) <= NOTHING


def test_every_chapter_ends_with_its_exercise_and_what_that_sees():
    pages = {page.stem: page.read_text() for page in (DOCS / "course").glob("[0-9a][0-9]_*.md")}
    assert set(pages) == set(exercises.exercises())
    for name, exercise in exercises.exercises().items():
        end = pages[name].partition("\n## Write it\n")[2]
        assert exercise.sees in end, name
        for action in ("write", "try"):
            assert f"    python -m tests.exercises {action} {name}\n" in end, name
