"""The tutorial `examples/journey.sh` goes from a text to a chat; every command in it is one that the program knows."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import step_rows
from ultrascale_jax.cli import command_line, main, train

SCRIPT = Path(__file__).parent.parent / "examples" / "journey.sh"
TEXT = SCRIPT.read_text()


def heredocs() -> list[tuple[str, str]]:
    """The command of each document in the script, and its text."""
    return re.findall(r"^([^\n]*) <<'EOF'\n(.*?)^EOF$", TEXT, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The words of each `ultrascale` command, the loop over parts written out."""
    text = re.sub(r"^[^\n]* <<'EOF'\n.*?^EOF$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    text = text.replace("\\\n", " ").replace("$STEPS", "4").replace("$TUNE_STEPS", "4")
    (words,) = re.findall(r"^TRAIN=\((.*)\)$", text, re.MULTILINE)
    text = text.replace('"${TRAIN[@]}"', words)
    found = re.findall(r"^ *(?:ultrascale|FIRST=\() ?([^()]*?)\)?$", text, re.MULTILINE)
    parts = [line.replace("$part", part) for line in found for part in ("train", "held_out")]
    return [shlex.split(line) for line in dict.fromkeys(parts)]


def run(*words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ultrascale", *words])
        main.main()


def test_its_corpus_becomes_shards_and_its_recipe_is_planned_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer").mkdir()
    documents = heredocs()
    for command, text in documents:
        if target := re.fullmatch(r"cat > (\S+)", command):
            Path(target[1]).write_text(text)
    for name, (_, text) in zip(("corpus", "tokenizer"), documents, strict=False):
        Path(f"{name}.py").write_text(text)
    runpy.run_path("corpus.py")
    known, trained = commands(), []
    assert {words[0] for words in known} >= {
        "prepare-data",
        "plan",
        "train",
        "evaluate",
        "generate",
    }
    for words in known:
        if words[0] in ("prepare-data", "plan"):
            run(*words)
        if "--train-bpe" in words:
            runpy.run_path("tokenizer.py")
        if words[0] == "train" and "--train.init-from" not in words:
            cfg, _ = command_line.parse(words[1:], prog="test", options=train.Options)
            trained.append(cfg.check(8).mesh.text)
    assert trained == ["pp=2,fsdp=2,sp=2", "fsdp=4,tp=2"]
    for shards in ("train", "held_out", "talks"):
        assert Path("shards", shards, "index.json").exists()


@pytest.mark.wide  # `tests/cli/test_finetune.py` and `tests/faults` have its parts
def test_the_journey_from_a_text_to_a_chat(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHON": sys.executable, "STEPS": "60", "TUNE_STEPS": "60"}
    command = ["bash", str(SCRIPT), str(tmp_path / "journey")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\$ kill -9 \d+\n", done.stdout)
    assert re.search(r"resumed from \S+/out/base/checkpoints/\d+", done.stdout)
    base, tuned = (step_rows(tmp_path / "journey/out" / name) for name in ("base", "tuned"))
    assert [row["step"] for row in tuned] == list(range(1, 61)) and base[-1]["step"] == 60
    assert base[-1]["loss"] < base[0]["loss"] - 3 and tuned[-1]["loss"] < tuned[0]["loss"] - 1
    before, after = re.findall(r"│ talks *│ *[\d,]+ │ *([\d.]+) │", done.stdout)
    assert float(after) < float(before) - 1
    assert "logits differ by" in done.stdout or "transformers reads config" in done.stdout
    assert "the capital of" in done.stdout.rpartition("$ ultrascale generate")[2]
