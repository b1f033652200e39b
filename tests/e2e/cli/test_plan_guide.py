"""`ultrascale plan guide`: the playbook's three steps, told with a model's own numbers."""

import json

import pytest

from ultrascale_jax.cli import plan

RUN = ["llama3_8b", "--gpus", "8", "--train.global-batch", "8", "--data.seq-len", "4096"]
ASKED = [*RUN, "--tokens", "15T", "--price", "2.5"]


@pytest.fixture(scope="module")
def found() -> dict:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        plan.main(["guide", *ASKED, "--json"])
    return json.loads(printed[-1])


def answer(capsys, *arguments: str) -> dict:
    plan.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_memory_of_each_way_is_that_of_plan_memory(found, capsys):
    rows = {(row["mesh"], row["zero"], row["remat"]): row for row in found["fit"]}
    assert [row["verdict"] for row in found["fit"]] == ["does not fit"] * 2 + ["fits"] * 5
    for (mesh, zero, remat), row in list(rows.items())[1:4:2]:
        work = ["--mesh", mesh, "--train.zero", str(zero), "--train.remat", remat]
        own = answer(capsys, "memory", *RUN, *work, "--train.microbatches", "1")
        assert row["peak_bytes"] == own["peak_bytes"]
        assert row["verdict"] == own["verdict"]


def test_the_best_is_that_of_plan_search(found, capsys):
    own = answer(capsys, "search", *RUN, "--compile", "0", "--top", "1", "--fixed", "zero=0,1,2,3")
    assert found["command"] == own["command"]
    best, *slower = found["throughput"]
    assert (best["step_s"], best["why"]) == (own["rows"][0]["step_s"], "best")
    assert {row["way"] for row in slower} >= {"with matrices split", "with a pipeline"}
    assert all(row["step_s"] > best["step_s"] and "slower" in row["why"] for row in slower)


def test_another_cluster_is_worth_what_makes_the_training_cost_the_same(found):
    rows = {row["what"]: row for row in found["other_clusters"]}
    assert "0.5 x the network" not in rows  # all in one node
    other, own = rows["h200 instead"], found["bill"]
    assert other["usd"] is None  # 2.5 USD is the price of an H100
    assert other["even_price"] * other["gpu_hours"] == pytest.approx(own["usd"])
    assert rows["b200 instead"]["days"] < other["days"] < own["days"]


def test_the_text_tells_the_three_steps(capsys):
    plan.main(["guide", "debug", "--gpus", "2", "--tokens", "1.5M"])
    text = capsys.readouterr().out
    for words in ("Step 1: fit", "Step 2: reach", "Step 3: maximise", "1.5 M tokens"):
        assert words in text
    assert "ultrascale plan compile debug --mesh" in text
