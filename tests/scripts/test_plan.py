"""`python -m scripts.plan compile`: what a step needs on GPUs that are not there."""

import json

import pytest

from scripts import plan

RUN = ["compile", "debug", "--gpus", "2", "--mesh", "fsdp=2", "--train.zero", "3"]


@pytest.mark.slow
def test_compile_reports_memory_and_collectives_as_json(capsys):
    plan.main([*RUN, "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert 0 < summary["argument_bytes"] < summary["peak_bytes"]
    by_kind = {(row["kind"], row["axes"]): row for row in summary["collectives"]}
    assert by_kind["all-gather", "fsdp"]["bytes"] > 0
    assert by_kind["reduce-scatter", "fsdp"]["bytes"] > 0
    assert summary["synchronous"] + summary["asynchronous"] > 0


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
