"""`python -m scripts.plan memory --software nanotron`: what the playbook's trainer needs of one GPU."""

import json

import pytest

from scripts.plan import VERBS
from ultrascale_jax.cli import plan

THEIRS = [
    *(
        "memory",
        "llama3_8b",
        "--software",
        "nanotron",
        "--gpus",
        "64",
        "--mesh",
        "pp=2,fsdp=8,sp=4",
    ),
    *("--train.zero", "1", "--train.remat", "none", "--train.global-batch", "256"),
    *("--train.microbatches", "32", "--seq-len", "4096"),
]


def test_parts_add_up_to_the_peak_and_the_timeline_reaches_it(capsys):
    plan.main([*THEIRS, "--json"], VERBS)
    found = json.loads(capsys.readouterr().out)
    assert (found["verb"], found["gpu"], found["gpus"]) == ("memory", "h100", 64)
    assert sum(found["parts"].values()) == pytest.approx(found["peak_bytes"], abs=1)
    assert max(size for _, size in found["timeline"]) == found["peak_bytes"]
    assert found["in_flight"] == 2
    assert found["fits"] == (found["peak_bytes"] <= found["usable_bytes"])


def test_what_it_cannot_do_is_one_line_that_names_the_field(capsys):
    with pytest.raises(SystemExit):
        plan.main(["memory", "llama3_8b", "--software", "nanotron"], VERBS)
    error = capsys.readouterr().err
    assert error.startswith("error: train.zero=3: the playbook's nanotron")
    assert error.count("\n") == 1
