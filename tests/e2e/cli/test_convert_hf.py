"""A checkpoint becomes a run that trains and samples, and a run becomes a checkpoint."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
import transformers

from tests import runs
from tests.hf_layout import assert_same_tensors, stored
from tests.paths import HF
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import check_same_run, config_from_dict
from ultrascale_jax.checkpoint.step_dirs import metadata
from ultrascale_jax.cli.convert_hf import Options, export_checkpoint, tokenizer_files
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.data.tokenizer import load_tokenizer
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state

FOLDER = HF / "llama3"


def two_devices():
    return make_mesh(MeshConfig.of(fsdp=2), jax.devices()[:2])


def imported(hf_dir, run_dir, precision="fp32", **sizes):
    """The config of a run made from `hf_dir`, on a mesh of these sizes.

    Most tests import llama3 with fsdp=2: its arrays are gathered and fingerprinted by programs that are compiled once.
    """
    cfg = Config(
        mesh=MeshConfig.of(**sizes),
        data=DataConfig(source="synthetic"),
        train=TrainConfig(precision=precision),
        log=LogConfig(run_dir=str(run_dir)),
    )
    return runs.imported(cfg, Path(hf_dir))


@pytest.mark.parametrize("folder", [FOLDER, HF / "phi3"], ids=lambda folder: folder.name)
def test_a_run_gives_the_checkpoint_back_that_it_began_with(tmp_path, folder):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    imported(folder, run_dir, pp=2, fsdp=2)
    options = Options(run_dir=str(run_dir), hf_dir=str(out), dtype="float32")
    export_checkpoint(options, two_devices())
    assert read_config(out) == read_config(folder)
    assert_same_tensors(stored(out), stored(folder))
    before, after = (json.loads((at / "config.json").read_text()) for at in (folder, out))
    for key in ("model_type", "max_position_embeddings"):
        assert after[key] == before[key]


def test_a_run_of_a_checkpoint_stands_at_step_0_with_fresh_moments(tmp_path):
    cfg, mesh = imported(FOLDER, tmp_path / "run", "fp16", fsdp=2), two_devices()
    with jax.set_mesh(mesh), Checkpoints(cfg) as checkpoints:
        assert checkpoints.latest == 0
        state = checkpoints.restore(0, abstract_state(cfg, mesh))
    assert int(state.step) == int(state.skipped) == int(state.skipped_in_a_row) == 0
    assert state.loss_scale is not None
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.opt_state))
    saved, params = load_params(cfg.log.run_dir, mesh)
    assert dataclasses.replace(saved, mesh=cfg.mesh) == cfg
    embed = stored(FOLDER)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(params.embed[...]), embed)


def word_tokenizer(*words):
    """The text of a `tokenizer.json` with these words, of which `</s>` is special."""
    vocab = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=words[0]))
    made.add_special_tokens(["</s>"])
    return made.to_str()


FILES = {
    "tokenizer.json": word_tokenizer("a", "</s>"),
    "tokenizer_config.json": '{"eos_token": "</s>"}',
    "chat_template.jinja": "{{ messages[0].content }}",
    "generation_config.json": '{"eos_token_id": 1}',
}
TOKEN_IDS = {"bos_token_id": 7, "eos_token_id": [1, 5], "pad_token_id": 3}


def with_tokenizer(folder, files=FILES):
    """The folder of a checkpoint that brings a tokenizer, and code that nobody may run or copy."""
    shutil.copytree(FOLDER, folder)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | TOKEN_IDS))
    return folder


def test_tokenizer_and_token_ids_are_those_of_the_checkpoint(tmp_path, monkeypatch):
    folder = with_tokenizer(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    imported("hf", "run", fsdp=2)
    Path("own.json").write_text(word_tokenizer("a", "b", "</s>"))
    meta = metadata(tmp_path / "run" / "checkpoints" / "0")
    saved = config_from_dict(meta["config"])
    own = DataConfig(source="text:own.txt", tokenizer="hf/tokenizer.json", seq_len=32)
    free = dataclasses.replace(saved, data=own, train=dataclasses.replace(saved.train, seed=7))
    same, other = (load_tokenizer(name).fingerprint for name in ("hf/tokenizer.json", "own.json"))
    assert check_same_run(meta, free, "data", "run/0", tokenizer=same) == []
    with pytest.raises(UserError, match=r"\n  data\.tokenizer: .* \(another than the"):
        check_same_run(meta, free, "data", "run/0", tokenizer=other)
    allow = CheckpointConfig(allow_change=("data.tokenizer",))
    free = dataclasses.replace(free, checkpoint=allow)
    assert len(check_same_run(meta, free, "data", "run/0", tokenizer=other)) == 1
    export_checkpoint(Options(run_dir="run", hf_dir="out"), two_devices())
    for place in (tmp_path / "run", tmp_path / "out"):
        assert {name: (place / name).read_text() for name in FILES} == FILES
        assert not (place / "modeling_evil.py").exists()
    assert TOKEN_IDS.items() <= json.loads(Path("out/config.json").read_text()).items()
    assert folder.is_dir()


def test_a_run_with_a_tokenizer_of_its_own_describes_it_for_transformers(tmp_path):
    """`AutoTokenizer` would take it for one of the model's family."""
    own, run_dir, out = tmp_path / "own.json", tmp_path / "run", tmp_path / "out"
    own.write_text(word_tokenizer("b", "a", "</s>"))
    run_dir.mkdir()
    for name, text in FILES.items():  # of the checkpoint with another tokenizer
        (run_dir / name).write_text(text)
    (run_dir / "hf_config.json").write_text(json.dumps(TOKEN_IDS))
    data = DataConfig(tokenizer=str(own))
    ids, files = tokenizer_files(Config(data=data), run_dir, 32)
    assert ids == {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    out.mkdir()
    for name, content in files.items():
        (out / name).write_bytes(content)
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert (loaded.eos_token_id, loaded("a").input_ids, loaded.chat_template) == (2, [1], None)
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 2
    of_bytes = {"generation_config.json": b'{\n  "eos_token_id": 0\n}\n'}
    assert tokenizer_files(Config(), tmp_path, 32) == ({**ids, "eos_token_id": 0}, of_bytes)
    own.unlink()
    with pytest.raises(UserError, match=r"data.tokenizer=.* there is no such file"):
        tokenizer_files(Config(data=data), tmp_path, 32)


def test_servers_are_told_every_token_that_ends_an_answer(tmp_path):
    """Of a checkpoint's own generation_config.json, or of none; the template comes with shards of conversations too."""
    made = tokenizers.Tokenizer.from_str(word_tokenizer("a", "</s>"))
    made.add_special_tokens(["<|im_end|>"])
    shards, run_dir = tmp_path / "shards", tmp_path / "run"
    shards.mkdir(), run_dir.mkdir()
    template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    made.save(str(shards / "tokenizer.json"))
    (shards / "chat_template.jinja").write_text(template)
    cfg = Config(data=DataConfig(tokenizer=str(shards / "tokenizer.json")))

    def generation():
        files = tokenizer_files(cfg, run_dir, 32)[1]
        assert files["chat_template.jinja"].decode() == template
        return json.loads(files["generation_config.json"])

    assert generation() == {"eos_token_id": [1, 2]}
    for path in list(shards.iterdir()):
        shutil.copy(path, run_dir)
    (run_dir / "hf_config.json").write_text(json.dumps({**TOKEN_IDS, "eos_token_id": 1}))
    assert generation() == {**TOKEN_IDS, "eos_token_id": [1, 2]}
    for given, expected in ((1, [1, 2]), ([2, 1], [2, 1]), (2, 2)):
        own = {"temperature": 0.6, "eos_token_id": given}
        (run_dir / "generation_config.json").write_text(json.dumps(own))
        assert generation() == own | {"eos_token_id": expected}
