"""The record of a run: strict JSON, one row a step, also after a resume, and few lines on the console."""

import io
import json

import pytest
from rich.console import Console

from ultrascale_jax.training.metrics import (
    RunLog,
    read_rows,
)


def row(step, **changes):
    values = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 8,
        "tokens_per_s": 80.0,
        "step_s": 0.1,
    }
    return {"step": step, **values, "mfu": None, "skipped": False, **changes}


def run_log(tmp_path, **changes):
    console = Console(file=io.StringIO(), force_terminal=False, width=300)
    return RunLog(
        tmp_path, **{"first_step": 0, "num_steps": 9, "console": console, **changes}
    ), console.file


def test_a_resumed_run_drops_the_rows_after_its_checkpoint_and_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3, 4)) + '{"step": 5, "lo'
    )
    log, _ = run_log(tmp_path, first_step=2)
    with log:
        log.step(row(3))
    assert [line["step"] for line in read_rows(path)] == [1, 2, 2, 3]
    assert read_rows(path)[-1]["loss"] == 2.0


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([1, 2, 3, 4, 5, 6, 7], None),
        ([1, 2], "steps 3 to 6: "),
        ([], "steps 1 to 6: "),
        ([2, 3, 5, 6], "steps 1, 4: "),
        ([6, 7], "steps 1 to 5: "),
    ],
)
def test_a_resumed_run_says_which_steps_have_no_row_and_keeps_the_others(tmp_path, there, words):
    path = tmp_path / "metrics.jsonl"
    rows = [row(step) for step in there] + [{"step": 4, "eval_loss": 1.0, "eval_tokens": 8}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log, text = run_log(tmp_path, first_step=6)
    log.close()
    said = text.getvalue()
    assert said == "" if words is None else f"has no rows of {words}it was cut" in said
    assert said.count("\n") == (words is not None)
    assert read_rows(path) == [line for line in rows if line["step"] <= 6]


def test_a_line_in_the_middle_that_is_not_json_is_refused_by_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\ngarbage\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


def test_the_console_shows_first_and_last_step_of_a_fast_run(tmp_path):
    log, text = run_log(tmp_path)
    with log:
        for step in range(1, 10):
            log.step(row(step))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("step 1/9  loss 2.0000") and lines[-1].startswith("step 9/9")
    assert len(lines) < 9


def test_a_terminal_gets_a_progress_bar_with_the_loss_and_a_pipe_does_not(tmp_path):
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with RunLog(tmp_path / str(terminal), first_step=0, num_steps=2, console=console) as log:
            log.step(row(1))
            log.step(row(2, loss=1.25))
        shown[terminal] = console.file.getvalue()
    assert "loss 1.2500" in shown[True] and "2/2" in shown[True] and "\x1b[" in shown[True]
    assert "\x1b[" not in shown[False]
