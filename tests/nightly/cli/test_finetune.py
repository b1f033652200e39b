"""Fine-tuning by commands, from a text to a chat, with conversations, adapters and preferences."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.chats import CHATML, turns, write_lines
from tests.commands import ultrascale
from tests.runs import eval_rows, step_rows
from ultrascale_jax.train_step.preference import SUMS

SMALL = (
    *("--train.global-batch", "8", "--train.microbatches", "1", "--train.remat", "none"),
    *("--data.seq-len", "64", "--train.eval-batches", "1", "--data.eval-fraction", "0.1"),
)


def command(*words):
    assert ultrascale(*words) in (None, 0)


def learn_preferences(facts):
    """Prefer an answer by commands, with the run `tuned` as reference, on two meshes one after the other."""
    pairs = [{"chosen": turns(q, a), "rejected": turns(q, f"not {a}")} for q, a in facts]
    write_lines(Path("pairs.jsonl"), pairs)
    words = ("--out", "pairs", "--tokenizer", "hf/tokenizer.json", "--preferences")
    command("prepare-data", "--input", "pairs.jsonl", *words)
    data = ("--data.source", "tokens:pairs", "--data.seq-len", "128", "--optim.lr", "1e-3")
    tune = ("train", "dpo", "--train.init-from", "tuned", *SMALL, *data)
    tune += ("--log.run-dir", "preferred")
    command(*tune, "--mesh", "fsdp=4,tp=2", "--train.steps", "8")
    command(*tune, "--mesh", "fsdp=2,sp=2,dp=2", "--train.steps", "12")
    rows, evaluations = step_rows(Path("preferred")), eval_rows(Path("preferred"))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-3)
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert rows[-1]["reward_accuracy"] > 0.9 and rows[-1]["reward_margin"] > 0.1
    metrics = {f"eval_{name}" for name in ("loss", "pairs", "reward_margin", *SUMS)}
    assert [set(row) for row in evaluations] == [metrics | {"step"}] * 2
    assert evaluations[-1]["eval_reward_accuracy"] > 0.9 and evaluations[-1]["eval_pairs"] >= 8
    command("convert-hf", "preferred", "preferred_hf")


def test_the_journey_from_text_to_a_chat_by_commands(tmp_path, monkeypatch, capsys):
    """Own tokenizer and model, exported; conversations; adapters; evaluation; chat; exports that say the same."""
    monkeypatch.chdir(tmp_path)
    facts = [(f"what is {n} plus {n}", f"{n} plus {n} is {2 * n}") for n in range(200)]
    Path("text.txt").write_text("\n".join(" ".join(fact) for fact in facts))
    command("prepare-data", "--input", "text.txt", "--out", "bpe", "--train-bpe", 300)
    made = tokenizers.Tokenizer.from_file("bpe/tokenizer.json")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save("tokenizer.json")
    model = ("--model.vocab-size", "304", "--model.num-layers", "2", "--data.tokenizer")
    text = ("--data.source", "text:text.txt", "--train.steps", "2")
    train_words = ("train", "debug", *SMALL, *model, "tokenizer.json", *text)
    command(*train_words, "--log.run-dir", "base", "--mesh", "fsdp=4,tp=2")
    command("convert-hf", "base", "hf", "--dtype", "float32")
    Path("hf/chat_template.jinja").write_text(CHATML)
    write_lines(Path("talks.jsonl"), [{"messages": turns(*fact)} for fact in facts])
    words = ("--out", "shards", "--tokenizer", "hf/tokenizer.json", "--chat")
    command("prepare-data", "--input", "talks.jsonl", *words)
    lora = ("--train.lora.rank", "8", "--optim.lr", "1e-2", "--data.source", "tokens:shards")
    tune = ("train", "finetune", "--train.init-from", "hf:hf", *SMALL, *lora)
    tune += ("--log.run-dir", "tuned")
    command(*tune, "--mesh", "fsdp=4,tp=2", "--train.steps", "20")
    command(*tune, "--mesh", "fsdp=2,sp=2,dp=2", "--train.steps", "30")
    rows = step_rows(Path("tuned"))
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    learn_preferences(facts)
    command("convert-hf", "tuned", "full", "--dtype", "float32")
    command("convert-hf", "tuned", "peft", "--adapters", "--dtype", "float32")
    assert Path("full/chat_template.jinja").read_text() == CHATML
    told = []
    for place in ("tuned", "full"):
        capsys.readouterr()
        command("evaluate", place, "--source", "text:text.txt", "--json", "--precision", "fp32")
        loss = json.loads(capsys.readouterr().out)["sources"]["text:text.txt"]["loss"]
        monkeypatch.setattr("sys.stdin", io.StringIO("what is 7 plus 7\n"))
        command("generate", place, "--chat", "--temperature", "0", "--num-tokens", "12")
        told.append((loss, capsys.readouterr().out))
    assert told[0][0] == pytest.approx(told[1][0], rel=1e-5) and told[0][1] == told[1][1]
