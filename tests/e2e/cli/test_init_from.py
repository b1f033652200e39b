"""`--train.init-from`: a run begins with the parameters of a Hugging Face folder or of another run, on any mesh."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.commands import refused
from tests.paths import HF
from tests.tokenizers import write_tokenizer
from ultrascale_jax.checkpoint.init_from import Source, check_run_dir, files
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.config import Config, DataConfig, UserError
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.training.setup import open_run

FOLDER = HF / "llama3"
TINY = "debug --data.seq-len 64 --data.source synthetic --train.global-batch 8"
WORDS = {"version": "1.0", "added_tokens": []} | {
    "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
}


def test_a_run_hands_its_tokenizer_on_with_the_settings_beside_it(tmp_path):
    """Without them documents would end with another token."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = write_tokenizer(
        tmp_path / "shards", {"</s>": True, "<eos>": True}, {"eos_token": "<eos>"}
    )
    write_tokenizer(run_dir, {"</s>": True}, {"eos_token": "</s>"})
    (run_dir / "generation_config.json").write_text("{}")
    for name in (path, path.parent):
        cfg = Config(data=DataConfig(tokenizer=str(name)))
        (run_dir / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
        brought = files(Source(run_dir, False))
        for one in ("tokenizer.json", "tokenizer_config.json"):
            assert brought[one] == path.with_name(one).read_bytes()
        assert brought["generation_config.json"] == b"{}"


def parsed(words):
    return command_line.parse(words.split(), prog="test", options=train.Options)


def test_model_and_tokenizer_are_those_of_the_folder_and_options_change_them(tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(FOLDER, folder)
    cfg, _ = parsed(f"finetune --train.init-from hf:{folder} --log.run-dir {tmp_path}/run")
    assert (cfg.model, cfg.data.tokenizer) == (read_config(FOLDER), "bytes")
    assert cfg.train.init_from == f"hf:{folder}"
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    cfg, _ = parsed(
        f"finetune --train.init-from hf:{folder} --log.run-dir {tmp_path}/run --model.rope-theta 7"
    )
    assert cfg.data.tokenizer == f"{tmp_path}/run/tokenizer.json"
    assert cfg.model.rope_theta == 7 and cfg.model.d_ff == read_config(FOLDER).d_ff


def test_options_of_the_model_are_checked_with_the_folders_model_not_the_recipes(tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    wide = {"num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 4}
    (folder / "config.json").write_text(json.dumps(config | wide))
    words = f"finetune --train.init-from hf:{folder} --log.run-dir {tmp_path}/run"
    cfg, _ = parsed(f"{words} --model.num-kv-heads 12 --train.seed 3")
    assert (cfg.model.num_heads, cfg.model.num_kv_heads, cfg.train.seed) == (24, 12, 3)
    for wrong, message in (("num-kv-heads 5", "must divide"), ("num-kv-heds 8", "did you mean")):
        with pytest.raises(SystemExit):
            parsed(f"{words} --model.{wrong}")
        assert message in capsys.readouterr().err


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("run_dir", ["hf", "sub/../hf", "link", "link/"])
def test_no_command_writes_over_the_hugging_face_folder_that_it_reads(
    tmp_path, monkeypatch, capsys, run_dir
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER, "hf")
    Path("sub").mkdir()
    Path("link").symlink_to("hf")
    before = contents(tmp_path)
    begin = ["debug", "--train.init-from", "hf:hf", "--log.run-dir", run_dir]
    for words in (["train", *begin], ["launch", "--", *begin]):
        assert "init_from='hf:" in refused(capsys, *words)
    assert "already holds" in refused(capsys, "convert-hf", "run", run_dir)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "config", ['{"model_type": "bert"}', '{"name": "mine", "lr": 1}', "lr = 1"]
)
def test_no_command_writes_into_a_folder_with_a_config_of_somebody_else(
    tmp_path, monkeypatch, capsys, config
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER, "hf")
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text(config)
    Path("a.txt").write_text("text")
    before = contents(tmp_path)
    for words in (
        ["train", "debug", "--log.run-dir", "theirs"],
        ["train", "debug", "--log.run-dir", "theirs", "--train.init-from", "hf:hf"],
        ["launch", "--", "debug", "--log.run-dir", "theirs"],
    ):
        said = refused(capsys, *words)
        assert "theirs" in said and "config.json" in said
    assert "log.run_dir='theirs': holds a config.json that is no run's" in said
    said = refused(capsys, "prepare-data", "--input", "a.txt", "--out", "theirs")
    assert "out='theirs': holds a config.json" in said
    cfg, _ = parsed(TINY)
    cfg = dataclasses.replace(cfg, log=dataclasses.replace(cfg.log, run_dir="theirs")).check(8)
    with pytest.raises(UserError, match=r"log\.run_dir='theirs': holds a config\.json"):
        with open_run(cfg, make_mesh(cfg.mesh), hooks=(), profile=None):
            pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("option", ["--train.init-from {}", "--checkpoint.branch-from {}@3"])
def test_a_run_does_not_begin_with_a_step_of_its_own_directory(tmp_path, option):
    folder = tmp_path / "run"
    (folder / "checkpoints/3").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(parsed(TINY)[0])))
    (tmp_path / "link").symlink_to("run")
    words = f"{TINY} --log.run-dir {tmp_path}/link"
    check_run_dir(parsed(words)[0])
    with pytest.raises(SystemExit, match="2"), command_line.user_errors():
        check_run_dir(parsed(f"{words} {option.format(folder)}")[0])
