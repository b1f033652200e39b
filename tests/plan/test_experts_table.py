"""The table of compiled runs with experts: the formulas beside XLA, and what it says of the ways to the experts."""

from pathlib import Path
from statistics import median

import pytest

from scripts.plan_verbs import experts_table, memory_table, pipelines_table
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import Run

TABLE = Path(__file__).parents[2] / "docs" / "planning" / "experts.csv"
ROWS = memory_table.read(TABLE)
WAYS = ROWS[: len(experts_table.WAYS)]


def planned(row: dict[str, str]) -> Run:
    return Run.of(*memory_table.config(row))


def exposed_s(ep: int, dispatch: str = "dropless", nodes: int = 1, overlap: str = "off") -> float:
    """Seconds that tokens on their way are waited for."""
    wanted = {"dispatch": dispatch, "nodes": str(nodes), "overlap": overlap}
    (row,) = (r for r in WAYS if wanted.items() <= r.items() and planned(r).mesh.ep == ep)
    return float(row["exposed_travel_s"])


def test_the_table_is_complete_and_has_the_formulas_as_they_are():
    hint = f"run: python -m scripts.plan_verbs.experts_table --out {TABLE}"
    names = experts_table.NAMES
    listed = [[run[name] for name in names] for run in experts_table.runs()]
    assert [[row[name] for name in names] for row in ROWS] == listed, hint
    for row in ROWS:
        assert pipelines_table.with_formula(row) == row, hint


@pytest.mark.parametrize("held", ["-", "held"])
def test_the_memory_formulas_agree_with_xla(held):
    errors = [abs(float(row["error_pct"])) for row in ROWS if row["held"] == held]
    assert len(errors) >= 5
    assert median(errors) < 5
    assert max(errors) < 15


def test_the_step_by_formula_is_what_the_simulation_of_the_schedule_says():
    ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in WAYS]
    assert 0.9 < median(ratios) < 1.1
    assert 0.75 < min(ratios) and max(ratios) < 1.25


def test_the_table_covers_models_meshes_and_ways():
    runs = [planned(row) for row in ROWS]
    assert {run.mesh.ep for run in runs} >= {1, 2, 4, 8, 16, 32, 64}
    assert {run.moe.dispatch for run in runs} == {"dropless", "capacity", "allgather"}
    assert {run.moe.nodes for run in runs} >= {1, 2, 4, 8}
    assert {run.remat for run in runs} == {"none", "selective", "dots", "full"}
    assert {run.zero for run in runs} >= {1, 2, 3}
    assert any(run.mesh.sp > 1 for run in runs) and any(run.mesh.tp > 1 for run in runs)
    assert any(run.mesh.cp > 1 for run in runs) and any(run.microbatches > 1 for run in runs)
    assert any(run.shape.latent for run in runs) and any(run.shape.dense_layers for run in runs)


def test_everything_fits_that_the_table_shows():
    usable = find_gpu("h100").usable_bytes
    assert all(int(row["xla_bytes"]) <= usable for row in ROWS)


def test_a_token_that_travels_once_to_a_node_is_waited_for_less():
    assert exposed_s(64, nodes=8) < exposed_s(64)
    assert exposed_s(8) < exposed_s(16) < exposed_s(64)


def test_the_ways_are_shown_as_a_table():
    lines = experts_table.table(ROWS).splitlines()
    assert len(lines) == 2 + len(experts_table.WAYS)
    assert lines[2].startswith("| 8 | dropless | ")
    assert any(line.startswith("| 64 | dropless, 8 nodes, overlap | ") for line in lines)


@pytest.mark.wide
def test_xla_still_takes_what_the_table_says():
    row = experts_table.measure(ROWS[-9])
    assert int(row["xla_bytes"]) == pytest.approx(int(ROWS[-9]["xla_bytes"]), rel=0.02)
