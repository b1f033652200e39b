"""`scripts/studies.py`: the pictures of the pages have the numbers of the formulas, and of a table of runs."""

import dataclasses
from pathlib import Path

import pytest

from scripts import studies
from tests.recipes import pinned
from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.configs import llama3_8b
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.units import GIB

RUNS = Path(__file__).parents[2] / "data/plan/playbook_runs.csv"


@pytest.fixture(scope="module")
def scenario() -> studies.Scenario:
    cfg = dataclasses.replace(pinned(llama3_8b.config), mesh=MeshConfig(fsdp=8, sp=8))
    return studies.Scenario(name="llama3_8b", cfg=cfg, cluster=find_cluster(None, "h100", 64))


def test_a_stack_is_as_high_as_the_breakdown(scenario):
    figure = studies.by_sequence(scenario)
    bars = {bar.label: bar for bar in figure.panels["recompute selective"]}
    assert list(bars) == ["2k", "4k", "8k", "16k", "32k"]
    run = dataclasses.replace(scenario.run, remat="selective", seq_len=4096, sequences=1)
    assert bars["4k"].total == pytest.approx(breakdown(run).peak_bytes / GIB, rel=1e-6)
    assert figure.limit == scenario.cluster.gpu.usable_bytes / GIB


def test_the_fastest_measured_run_stands_in_its_cell(tmp_path):
    figure = studies.measured(RUNS)
    assert set(figure.rows) == {"1B", "8B"} and "64" in figure.columns
    assert all(cell.value > 0 for cell in figure.cells.values())
    path = tmp_path / "runs.csv"
    path.write_text("model,nodes\n8B,1\n")
    with pytest.raises(UserError, match=r"lacks the column\(s\) mbs, gas"):
        studies.measured(path)


def test_the_command_writes_a_picture(tmp_path, capsys):
    path = tmp_path / "zero.png"
    studies.main(["memory_zero", "llama3_8b", "--gpus", "16", "--out", str(path)])
    assert f"wrote {path}" in capsys.readouterr().out and path.read_bytes()[:4] == b"\x89PNG"
