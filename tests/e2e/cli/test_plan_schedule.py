"""`ultrascale plan schedule`: tables of schedules, their numbers, figures and files."""

import json

import pytest

from ultrascale_jax.cli import plan
from ultrascale_jax.config import SCHEDULES
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.schedules.text import as_text


def answer(capsys, *arguments):
    plan.main(["schedule", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def text(capsys, *arguments):
    plan.main(["schedule", *arguments])
    return capsys.readouterr().out


def test_all_schedules_side_by_side(capsys):
    rows = {row["name"]: row for row in answer(capsys)["schedules"]}
    assert tuple(rows) == SCHEDULES
    # p=4, m=8, two stages a rank: the figures of the issue.
    lock_step = {name: round(row["bubble"]["lockstep"], 4) for name, row in rows.items()}
    assert (lock_step["afab"], lock_step["1f1b"]) == (0.375, 0.375)
    assert (lock_step["interleaved"], lock_step["zb_uniform"]) == (0.1875, 0.125)
    assert all(lock_step[name] > 0.375 for name in ("zb_h1", "zb_v", "dualpipe_v"))
    assert rows["zb_v"]["bubble"]["dependencies"] == pytest.approx(0.0625)
    assert rows["1f1b"]["in_flight"] == [8, 6, 4, 2]
    shown = text(capsys)
    assert all(name in shown for name in SCHEDULES) and "18.8%" in shown


def test_a_schedule_that_does_not_exist_for_the_numbers_says_why(capsys):
    rows = {row["name"]: row for row in answer(capsys, "--microbatches", "3")["schedules"]}
    assert rows["dualpipe_v"]["refused"].startswith("train.microbatches=3: ")
    assert "refused" not in rows["1f1b"]
    assert "must be at least 4" in text(capsys, "--microbatches", "3")


def test_one_schedule_is_shown_with_its_table(capsys):
    shown = text(capsys, "interleaved", "--ranks", "2", "--microbatches", "4", "--virtual", "2")
    table = schedules.build("interleaved", 2, 4, 2)
    assert shown.startswith(as_text(table))
    assert "formula 12.5%, lock step 12.5%" in shown
    found = answer(capsys, "interleaved", "--ranks", "2", "--microbatches", "4")
    assert found["ticks"] == len(found["table"]) == len(table.ticks)
    assert found["table"][0] == [{"F": [0, 0]}, {}]


def test_a_table_is_written_and_read_again(tmp_path, capsys):
    path = tmp_path / "own.csv"
    said = text(capsys, "zb_uniform", "--virtual", "2", "--csv", str(path))
    assert f"--pp.schedule {path}" in said
    own = answer(capsys, str(path))
    assert own["table"] == answer(capsys, "zb_uniform", "--virtual", "2")["table"]
    assert own["virtual"] == 2


def test_a_figure_is_drawn_of_one_schedule_and_of_all(tmp_path, capsys):
    few = "--ranks", "2", "--microbatches", "4"
    for name in (["zb_v"], []):
        path = tmp_path / f"{len(name)}.png"
        said = text(capsys, *name, *few, "--figure", str(path), "--runtime", "dependencies")
        assert said.endswith(f"wrote {path}\n")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
