"""Pages that list everything of a kind list what there is."""

import re
from pathlib import Path

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.main import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


def test_start_here_has_every_command():
    part = (DOCS / "start.md").read_text().partition("## Every command\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^ultrascale ([\w-]+)", part, re.MULTILINE)) == set(COMMANDS)


def test_the_table_of_recipes_has_every_recipe():
    page = (DOCS / "recipes.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", page, re.MULTILINE)  # four columns
    assert sorted(names) == sorted(command_line.recipes())
