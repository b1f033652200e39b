"""The recorded comparison with MaxText; no test compiles a program or installs MaxText."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from scripts.validation import maxtext
from scripts.validation.maxtext import MAXTEXT, OURS, RUNS, TRAINERS, Program
from ultrascale_jax.cli.plan_commands import common, compile

BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks"
FILE = BENCHMARKS / "maxtext.csv"

RUN = "8B bf16"
OF_8B = Program(run=RUN, trainer=MAXTEXT, gpus=8, options="", step_tokens=131_072, gib=60.0)


@pytest.fixture(scope="module")
def rows():
    return maxtext.read(FILE)


def test_the_file_has_every_program_with_figures_or_a_reason(rows):
    assert [row.key for row in rows] == [program.key for program in maxtext.programs(RUNS)]
    assert all(bool(row.step_ms) != bool(row.reason) for row in rows)


def test_both_trainers_read_the_same_tokens_and_ours_fits(rows):
    for run, (gpus, options, _) in RUNS.items():
        command = [*shlex.split(options), "--gpus", str(gpus)]
        cfg, _, _ = common.parse(command, "compile", compile.Options, "")
        tokens = cfg.train.global_batch * cfg.data.seq_len
        assert {row.step_tokens for row in rows if row.run == run and row.step_ms} == {tokens}
        ours = maxtext.best(rows, run, OURS)
        assert ours is not None and ours.fits


def test_the_page_shows_the_file(rows):
    page = (BENCHMARKS / "h100_peers.md").read_text()
    assert maxtext.table(rows) in page and maxtext.options(rows) in page
    assert f"MaxText {maxtext.VERSION}" in page


def test_the_fastest_that_fits_is_shown_and_else_the_reason():
    slow, fast, large = (
        dataclasses.replace(OF_8B, options=name, step_ms=ms, gib=gib)
        for name, ms, gib in (("slow", 2000.0, 30.0), ("fast", 1800.0, 60.0), ("large", 1.0, 99.0))
    )
    failed = dataclasses.replace(OF_8B, reason="it asks a GPU", gib=0.0)
    assert maxtext.best([slow, fast, large, failed], RUN, MAXTEXT) == fast
    assert maxtext.best([failed, large], RUN, MAXTEXT) == large
    assert maxtext.best([], RUN, MAXTEXT) is None
    ours = dataclasses.replace(fast, trainer=OURS, step_ms=1500.0)
    assert maxtext.table([slow, fast, ours]).endswith(
        "| 1,800 | 9,102 | 60.0 | 1,500 | 10,923 | 1.20 |"
    )
    assert "| it asks a GPU |  |  | 60.0 |" in maxtext.table([failed, ours])
    assert "99.0 | 1, does not fit |" in maxtext.table([large, ours])
    (bar,) = maxtext.figure([slow, fast, ours]).panels[""]
    assert bar.total == pytest.approx(1.2) and bar.note == "1,800 ms and 1,500 ms"


def test_rows_are_written_in_order_and_read_back(tmp_path):
    made = list(maxtext.programs([RUN]))
    gone = dataclasses.replace(made[0], options="of an older version")
    maxtext.write(tmp_path / "a.csv", [*reversed(made), gone])
    assert maxtext.read(tmp_path / "a.csv") == made
    assert maxtext.read(tmp_path / "none.csv") == []


def test_each_trainer_is_compiled_with_the_flags_of_a_run(tmp_path):
    (tmp_path / f".maxtext-{maxtext.VERSION}").touch()  # nothing is installed
    theirs, *_, ours = maxtext.programs([RUN])
    command = maxtext.command_of(theirs, tmp_path)
    assert command[0] == str(tmp_path / "bin" / "python")
    assert json.loads(command[command.index("--flags") + 1]).keys() >= maxtext.GPU_FLAGS.keys()
    assert command[-2:] == shlex.split(theirs.options)[-2:]
    cublas = dataclasses.replace(theirs, flags="run,cublas")
    assert '"xla_gpu_enable_triton_gemm": false' in " ".join(maxtext.command_of(cublas, tmp_path))
    assert maxtext.command_of(ours, tmp_path)[3:7] == ["compile", "llama3_8b", "--gpus", "8"]


def test_a_program_that_fails_has_its_last_error_as_the_reason(tmp_path, monkeypatch):
    says = "printf 'Traceback:\\nValueError: no such mesh\\n  at [main]\\n' >&2; exit 1"
    for script, reason in ((says, "ValueError: no such mesh"), ("exit 3", "exit code 3")):
        command = ["bash", "-c", script]
        monkeypatch.setattr(maxtext, "command_of", lambda *_, command=command: command)
        assert maxtext.measure(OF_8B, tmp_path).reason == reason
    assert {program.trainer for program in maxtext.programs(RUNS)} == set(TRAINERS)
