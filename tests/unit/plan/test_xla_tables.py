"""The tables of compiled programs, docs/planning/*.csv: the formulas beside XLA's own memory plan and schedule."""

from functools import cache
from statistics import median

import pytest

from scripts.validation import xla_tables
from ultrascale_jax.plan.formulas.memory import state
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.verdict import POSSIBLE, SURE
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB


def kept(name: str) -> list[dict[str, str]]:
    return xla_tables.read(xla_tables.PLANNING / f"{name}.csv")


@cache
def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table, with what the formulas say today."""
    return [xla_tables.with_formula(row) for row in kept(name)]


def planned(row: dict[str, str]) -> Run:
    return Run.of(*xla_tables.config(row))


def ways() -> list[dict[str, str]]:
    """The rows of the full Qwen3 30B-A3B on 128 H100s, one for each way to the experts."""
    return [r for r in rows("experts") if (r["model"], r["layers"]) == ("QWEN3_30B_A3B", "all")]


@pytest.mark.parametrize("name", xla_tables.NAMES)
def test_a_table_is_complete_and_has_the_formulas_as_they_are(name):
    hint = f"run: python -m scripts.validation.xla_tables {name}"
    assert all(row["xla_bytes"] for row in kept(name)), hint
    assert rows(name) == kept(name), hint


@pytest.mark.parametrize("held", ["-", "held"])
@pytest.mark.parametrize(
    ("name", "least_rows", "middle", "worst"),
    [
        ("memory_xla", 20, 5, 15),
        ("pipelines", 9, 2, 10),
        ("context", 5, 3, 10),
        ("experts", 5, 5, 15),
    ],
)
def test_the_memory_formulas_agree_with_xla(name, held, least_rows, middle, worst):
    errors = [abs(float(row["error_pct"])) for row in rows(name) if row["held"] == held]
    assert len(errors) >= least_rows
    assert median(errors) < middle
    assert max(errors) < worst


@pytest.mark.parametrize(
    ("name", "middle", "ends"),
    [
        ("pipelines", (0.85, 1.05), (0.7, 1.3)),
        ("context", (0.9, 1.02), (0.8, 1.1)),
        ("experts", (0.9, 1.1), (0.75, 1.25)),
    ],
)
def test_the_step_by_formula_is_what_the_simulation_of_the_schedule_says(name, middle, ends):
    some = ways() if name == "experts" else rows(name)
    ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in some]
    assert middle[0] < median(ratios) < middle[1]
    assert ends[0] < min(ratios) and max(ratios) < ends[1]


def test_what_rests_between_steps_is_what_xla_takes_as_arguments():
    for row in rows("memory_xla"):
        run = planned(row)
        rests = sum(state(run, weights_of(run)).values())
        assert rests == pytest.approx(int(row["argument_bytes"]), rel=1e-3), row


def test_what_fits_by_formula_fits_and_what_does_not_does_not():
    ratios = {
        (row["mesh"], n): int(row["xla_bytes"]) / int(row["formula_bytes"])
        for name in xla_tables.NAMES
        for n, row in enumerate(kept(name))
        if int(row["xla_bytes"]) > 8 * GIB
    }
    assert len(ratios) > 140
    wrong = [mesh for (mesh, _), r in ratios.items() if r > 1 / SURE or r < 1 / POSSIBLE]
    # Qwen3 30B-A3B: its experts on many ranks, and a model of four layers.
    assert sorted(wrong) == ["ep=8", "fsdp=2,ep=64", "fsdp=2,ep=64", "fsdp=4,ep=32"]
