"""The errors of the memory formulas that `plan/verdict.py` counts on, by XLA's own plans of docs/planning/*.csv."""

import csv
from pathlib import Path

from ultrascale_jax.plan.verdict import POSSIBLE, SURE, by_formula, by_program

TABLES = Path(__file__).parents[2] / "docs/planning"
GIB = 2**30


def programs():
    """Yield of each compiled program above 8 GiB its table and row, and XLA's bytes over the formula's."""
    for name in ("memory_xla", "pipelines", "context", "experts"):
        with (TABLES / f"{name}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                xla, formula = int(row["xla_bytes"]), int(row["formula_bytes"])
                if xla > 8 * GIB:
                    yield name, row, xla / formula


def test_what_fits_by_formula_fits_and_what_does_not_does_not():
    found = list(programs())
    assert len(found) > 140
    wrong = [row["mesh"] for _, row, ratio in found if ratio > 1 / SURE or ratio < 1 / POSSIBLE]
    assert len(wrong) == 4 and all(mesh.partition("ep=")[2] in ("32", "64") for mesh in wrong)


def test_the_bands():
    usable = 100
    bytes_of = (90, 91, 92, 106, 107)
    assert [by_formula(n, usable) for n in bytes_of] == ["fits"] * 2 + ["unsure"] * 2 + [
        "does not fit"
    ]
    assert by_program(100, 0, usable) == "fits"
    assert by_program(100, 1, usable) == "does not fit"
