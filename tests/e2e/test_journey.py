"""The tutorial `examples/journey.sh` goes from a text to a chat; every command in it is one that the program knows."""

import re
import runpy
import shlex
from pathlib import Path

from tests.commands import ultrascale
from tests.paths import ROOT
from ultrascale_jax.cli import command_line, train

TEXT = (ROOT / "examples" / "journey.sh").read_text()


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
    assert {words[0] for words in known} >= {"prepare-data", "plan", "train", "evaluate"}
    for words in known:
        if words[0] in ("prepare-data", "plan"):
            assert ultrascale(*words) in (None, 0)
        if "--train-bpe" in words:
            runpy.run_path("tokenizer.py")
        if words[0] == "train" and "--train.init-from" not in words:
            cfg, _ = command_line.parse(words[1:], prog="test", options=train.Options)
            trained.append(cfg.check(8).mesh.text)
    assert trained == ["pp=2,fsdp=2,sp=2", "fsdp=4,tp=2"]
    for shards in ("train", "held_out", "talks"):
        assert Path("shards", shards, "index.json").exists()
