"""The mistakes of a newcomer: each gets one error, and the command that the error asks for works."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import tokenizers

from tests.chats import write_lines
from tests.checkpoints import save
from tests.commands import refused, ultrascale
from tests.paths import HF
from tests.states import some_state
from ultrascale_jax.cli import command_line, devices, train
from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.training.setup import make_loader, open_run

MY_RECIPE = """
import dataclasses
from ultrascale_jax.configs.debug import config as debug
model = dataclasses.replace(debug.model, num_layers=2)
data = dataclasses.replace(debug.data, source="text:text/*.txt", seq_len=64, eval_fraction=0)
config = dataclasses.replace(debug, model=model, data=data)
"""

MISTAKES = [
    (
        "train ./my.py --data.source tokens:bpe",
        "set data.tokenizer=bpe/tokenizer.json",
        "train ./my.py --data.source tokens:bpe --data.tokenizer bpe/tokenizer.json --model.vocab-size 512",
    ),
    (
        "train ./my.py --data.source tokens:made",
        "ultrascale prepare-data --input 'FILES' --out made --tokenizer bytes",
        "prepare-data --input text/*.txt --out made --tokenizer bytes --workers 1",
        "train ./my.py --data.source tokens:made",
    ),
    (
        "train ./my.py --data.tokenizer none.json",
        "ultrascale prepare-data --input 'FILES' --out DIR --train-bpe 32768 trains one",
        "prepare-data --input text/*.txt --out dir --train-bpe 32768 --workers 1",
        "train ./my.py --data.tokenizer dir/tokenizer.json --model.vocab-size 32768",
    ),
    (
        "prepare-data --input a.jsonl --out own",
        r"no text in 'text' but in \['body'\]; give another --text-field",
        "prepare-data --input a.jsonl --out own --text-field body --workers 1",
    ),
    (
        "train ./my.py --log.run-dir w --train.init-from trained --train.dpo.beta 0.1",
        "no preference pairs.* ultrascale prepare-data --preferences --input 'FILES' --out DIR --tokenizer bytes$",
        "prepare-data --preferences --input pairs.jsonl --out ranked --tokenizer bytes --workers 1",
        "train ./my.py --log.run-dir w --train.init-from trained --train.dpo.beta 0.1 --data.source tokens:ranked",
    ),
    (
        "train ./my.py --log.run-dir w --data.source tokens:pairs",
        "holds preference pairs; give --train.dpo.beta 0.1, and the model to tune by --train.init-from$",
        "train ./my.py --log.run-dir w --data.source tokens:pairs --train.dpo.beta 0.1 --train.init-from trained",
    ),
    (
        "train debug --train.init-from hf:hf --log.run-dir u --data.tokenizer bpe/tokenizer.json",
        "is another tokenizer than .*hf/tokenizer.json, .*; leave it out",
        "train debug --train.init-from hf:hf --log.run-dir u --print-config",
    ),
    (
        "convert-hf hf out",
        "make a run of it: ultrascale train finetune --train.init-from hf:hf",
        "train finetune --train.init-from hf:hf --print-config",
    ),
]
"""A command that cannot be, what its error says, and the commands that it asks for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what a newcomer has: a recipe, text, shards, a run and a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("newcomer")
        patch.chdir(folder)
        Path("my.py").write_text(MY_RECIPE)
        Path("text").mkdir()
        Path("text/a.txt").write_text(" ".join(f"{n} times {n}" for n in range(2000)))
        Path("a.jsonl").write_text(json.dumps({"body": "some text", "id": 1}))
        rows = [{"prompt": f"{n}?", "chosen": f" {n}", "rejected": f" not {n}"} for n in range(200)]
        write_lines(Path("pairs.jsonl"), rows)
        follow("prepare-data --input text/*.txt --out bpe --train-bpe 300 --workers 1")
        follow("prepare-data --input pairs.jsonl --out pairs --workers 1")
        shutil.copytree(HF / "llama3", "hf")
        words = tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")
        made = tokenizers.Tokenizer(words)
        made.add_special_tokens(["</s>"])
        made.save("hf/tokenizer.json")
        cfg, _ = parsed("./my.py --log.run-dir trained")
        state = some_state(cfg, make_mesh(cfg.mesh))
        save(cfg, state, 1, fingerprint=make_loader(cfg).fingerprint)
    return folder


def parsed(words):
    """The configuration and options of `ultrascale train WORDS`."""
    line = shlex.split(words)
    cfg, options = command_line.parse(line, prog="ultrascale train", options=train.Options)
    return devices.on_devices(cfg, options, lambda why: None), options


def follow(line):
    """Run `ultrascale LINE`; a run stops before its first step."""
    command, _, words = line.partition(" ")
    if command != "train" or "--print-config" in words:
        assert ultrascale(*shlex.split(line)) in (None, 0), line
        return
    cfg, _ = parsed(words)
    make_loader(cfg)
    if (Path(cfg.log.run_dir) / "checkpoints").exists():
        with open_run(cfg, make_mesh(cfg.mesh), hooks=(), profile=None):
            pass


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_a_mistake_is_one_error_and_what_it_asks_for_works(folder, monkeypatch, capsys, mistake):
    typed, said, *mended = mistake
    monkeypatch.chdir(folder)
    error = refused(capsys, *shlex.split(typed))
    assert re.search(said, error.rstrip("\n"), re.DOTALL), error
    for line in mended:
        follow(line)


def test_a_mesh_for_more_than_the_only_device_is_told_of_fake_ones():
    mesh = MeshConfig.parse("fsdp=4,tp=2")
    with pytest.raises(
        UserError, match=r"^mesh='fsdp=4,tp=2': needs 8 devices, .* --fake-devices 8 "
    ):
        devices.require_devices(mesh, 1)
    devices.require_devices(mesh, 8)
    with pytest.raises(SystemExit, match="0"):
        parsed("debug --mesh fsdp=4,tp=2 --fake-devices 8 --print-config")
