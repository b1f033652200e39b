"""Preferences are learned by commands, on one mesh and then on another, with the base as reference."""

import numpy as np
import pytest

from tests.chats import write_lines
from tests.commands import ultrascale
from tests.paths import HF
from tests.runs import eval_rows, step_rows
from ultrascale_jax.train_step.preference import SUMS


def test_answers_are_preferred_on_two_meshes_one_after_the_other(tmp_path):
    facts = [(f"{n} plus {n}?", f" it is {2 * n}") for n in range(200)]
    rows = [{"prompt": q, "chosen": a, "rejected": f" not {a}"} for q, a in facts]
    write_lines(tmp_path / "pairs.jsonl", rows)
    shards, run = tmp_path / "pairs", tmp_path / "run"
    words = ("--out", shards, "--tokenizer", "bytes", "--preferences", "--workers", 1)
    assert ultrascale("prepare-data", "--input", tmp_path / "pairs.jsonl", *words) in (None, 0)
    for mesh, steps in (("fsdp=4,tp=2", 8), ("fsdp=2,sp=2,dp=2", 12)):
        code = ultrascale(
            *("train", "dpo", "--train.init-from", f"hf:{HF / 'llama3'}", "--log.run-dir", run),
            *("--data.source", f"tokens:{shards}", "--data.seq-len", 128, "--mesh", mesh),
            *("--data.eval-fraction", 0.1, "--train.eval-batches", 1, "--optim.lr", 1e-3),
            *("--train.global-batch", 8, "--train.microbatches", 1, "--train.remat", "none"),
            *("--train.steps", steps),
        )
        assert code in (None, 0)
    rows, evaluations = step_rows(run), eval_rows(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-3)
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert rows[-1]["reward_accuracy"] > 0.9 and rows[-1]["reward_margin"] > 0.1
    metrics = {f"eval_{name}" for name in ("loss", "pairs", "reward_margin", *SUMS)}
    assert [set(row) for row in evaluations] == [metrics | {"step"}] * 2
    assert evaluations[-1]["eval_reward_accuracy"] > 0.9 and evaluations[-1]["eval_pairs"] >= 8
