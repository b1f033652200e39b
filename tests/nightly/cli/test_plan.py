"""`ultrascale plan` compiles the best of a search, and a pipeline, and executes a program; its verbs agree."""

import json

import pytest

from tests.plan_questions import LARGE, check, questions
from ultrascale_jax.cli import plan
from ultrascale_jax.parallel.pipeline import schedules


def answer(capsys, words: str) -> dict:
    plan.main([*words.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_best_of_a_search_are_compiled(capsys):
    found = answer(capsys, "search debug --gpus 2 --compile 1 --fixed pp=1")
    best, *_ = [row for row in found["rows"] if row["source"] == "compiled"]
    assert best["why"] == "best" and best["peak_bytes"] > 0


def test_a_pipeline_is_compiled_and_timed_by_its_schedule(capsys):
    # Eight rows of micro-batches in groups: the head stands in a branch that half of the ticks take.
    run = "compile debug --gpus 2 --mesh pp=2 --pp.schedule interleaved --train.microbatches 16"
    summary = answer(capsys, run)
    assert summary["label"].startswith("pp2 interleaved v2 ")
    by_kind = {(row["kind"], row["axes"]): row for row in summary["collectives"]}
    table = schedules.build("interleaved", 2, 16, 2)
    sends = sum(kind in set().union(*row) for row in table.ticks for kind in "FB")
    # XLA may join what a tick sends forward and back.
    assert len(table.ticks) <= by_kind["collective-permute", "pp"]["times"] <= sends
    assert summary["step_s"] > summary["idle_s"] > 0


def test_compile_executes_a_tiny_program(capsys):
    tiny = "--model.num-layers 2 --data.seq-len 32 --train.global-batch 8"
    run = f"compile debug --gpus 8 --mesh fsdp=8 {tiny} --execute"
    executed = answer(capsys, run)["executed"]
    assert executed["relative_differences"].keys() >= {"metrics['loss']", "state.step"}
    assert 0 < executed["largest"] == max(executed["relative_differences"].values()) < 1e-5


@pytest.mark.parametrize(("machine", "run"), questions(50)[4:] + questions(50, LARGE))
def test_guide_search_and_memory_agree(machine, run, capsys):
    check(capsys, machine, run)
