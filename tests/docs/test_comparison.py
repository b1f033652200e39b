"""Each cell of the comparison that is about another trainer names its source, and says so where there is none."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/comparison.md"
NOTHING = {"not found", "none"}
TRAINERS = ["MaxText", "torchtitan", "Megatron-Core, NeMo", "nanotron", "Levanter, Marin"]


def test_every_cell_about_another_trainer_has_a_source():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| |")
    ]
    others = [row for row in rows if row[0] != "**ultrascale_jax**"]
    trainers = [row[0] for row in others if row[0] != "JaxPP"]  # a library for pipelines
    assert trainers == TRAINERS * (len(rows) - len(others))
    without = [cell for row in others for cell in row[1:] if "](" not in cell and "][" not in cell]
    assert set(without) <= NOTHING
