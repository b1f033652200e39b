"""The benchmark of bubbles sleeps as often as the table says, and writes down what it found."""

import json
import subprocess
import sys

import pytest

from scripts.bench.report import Report
from scripts.bench_pipelines import Options, bench, measure, rows
from ultrascale_jax.config import UserError
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table import KINDS
from ultrascale_jax.plan.schedules.measures import bubble


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [
        pytest.param("1f1b", 4, 6, marks=pytest.mark.wide),
        pytest.param("interleaved", 2, 4, marks=pytest.mark.wide),
        pytest.param("zb_uniform", 4, 4, marks=pytest.mark.wide),
        ("zb_h1", 4, 8),
    ],
)
def test_in_lock_step_every_rank_sleeps_as_long_as_the_table_says(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches, 2 if name == "interleaved" else 0)
    row = measure(schedule, 0.001)
    work = schedule.microbatches * schedule.virtual * len(KINDS)
    for naps in row["naps"]:
        assert sum(naps.values()) / work - 1 == pytest.approx(row["table_bubble"])
    assert row["table_bubble"] == bubble(schedule)
    assert row["tick_ms"] > 0 and row["seconds"] > 0


def test_a_schedule_that_does_not_exist_is_skipped_with_the_reason(tmp_path, monkeypatch):
    found = dict(rows(8, 4))
    assert "must be at least 8" in str(found["interleaved"])
    assert not isinstance(found["zb_v, v 2"], str)

    monkeypatch.setattr("scripts.bench_pipelines.SCHEDULES", ("interleaved",))
    report = Report(tmp_path / "out.json", "pipelines", [])
    bench(Options(ranks=(8,), microbatches=(4,)), report)
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["status"] == "skipped" and "train.microbatches=4" in row["reason"]
    assert report.goals == []


@pytest.mark.wide
def test_the_command_measures_every_schedule(tmp_path):
    path = tmp_path / "pipelines.json"
    command = [sys.executable, "-m", "scripts.bench_pipelines", "--ranks", "2", "--ms", "2"]
    command += ["--microbatches", "4", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["complete"] and len(report["goals"]) == 1
    measured = {row["contestant"]: row for row in report["results"]}
    assert len(measured) == 7
    assert all(row["status"] == "measured" for row in measured.values())
    assert measured["zb_uniform, v 2"]["table_bubble"] == pytest.approx(2 / 24)
    assert "zb_uniform, v 2" in done.stdout


def test_options_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="microbatches"):
        Options(microbatches=(0,))
    with pytest.raises(UserError, match=r"ranks=\(4, 1\): must be at least 2"):
        Options(ranks=(4, 1))
    with pytest.raises(UserError, match=r"ranks=\(\): must be at least 2"):
        Options(ranks=())
    with pytest.raises(UserError, match="ms"):
        Options(ms=0.0)
