"""`python -m scripts.plan compile`: what a step needs on GPUs that are not there."""

import json

import pytest
from rich.console import Console

from scripts import plan
from scripts.plan_verbs import compile as verb
from ultrascale_jax.plan import hlo
from ultrascale_jax.plan.hardware import find_cluster

RUN = ["compile", "debug", "--gpus", "2", "--mesh", "fsdp=2", "--train.zero", "3"]


@pytest.mark.slow
def test_compile_reports_memory_communication_and_time(tmp_path, capsys):
    folder = tmp_path / "kept"
    plan.main([*RUN, "--json", "--dump", str(folder)])
    summary = json.loads(capsys.readouterr().out)
    assert 0 < summary["argument_bytes"] < summary["peak_bytes"]
    by_kind = {(row["kind"], row["axes"]): row for row in summary["collectives"]}
    assert by_kind["all-gather", "fsdp"]["bytes"] > 0
    assert by_kind["reduce-scatter", "fsdp"]["bytes"] > 0
    assert summary["synchronous"] + summary["asynchronous"] > 0

    exposed = sum(row["exposed_s"] for row in summary["collectives"])
    assert 0 < exposed <= sum(row["seconds"] for row in summary["collectives"])
    assert exposed == pytest.approx(sum(summary["exposed_s"].values()))
    assert summary["idle_s"] + sum(summary["busy_s"].values()) == pytest.approx(summary["step_s"])
    tokens = 16 * 256 / 2  # global_batch and seq_len of the recipe
    assert summary["tokens_per_s_gpu"] == pytest.approx(tokens / summary["step_s"])

    assert json.loads((folder / "summary.json").read_text()) == summary
    program = hlo.parse((folder / "step.hlo").read_text())
    assert program.entry and "exec_time_us" in (folder / "step.hlo").read_text()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == sum(map(len, summary["timeline"]["streams"].values()))
    assert {"fusion", "all-gather-start"} <= {event["name"].split(".")[0] for event in shown}

    verb.show(summary, find_cluster(None, "h100", 2), Console(width=120))
    text = capsys.readouterr().out
    assert f"{summary['step_s'] * 1e3:.1f}" in text and "reduce-scatter" in text and "fits" in text


def test_a_dump_that_cannot_be_written_is_refused_before_the_compilation(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        plan.main([*RUN, "--dump", str(tmp_path / "file" / "folder")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: dump=")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "verb=''"),
        (["guess", "debug"], "verb='guess'"),
        (["compile", "debug", "--gpus", "3", "--mesh", "fsdp=2"], "mesh='fsdp=2'"),
        (["compile", "debug", "--gpus", "9"], "num_devices=9"),
        (["compile", "debug", "--gpu", "tpu"], "gpu='tpu'"),
    ],
)
def test_nonsense_is_one_line_that_names_the_field(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
