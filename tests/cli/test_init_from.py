"""`--init-from`: a run begins with the parameters of a Hugging Face folder or of another run, on any mesh."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.tokenizers import write_tokenizer
from ultrascale_jax.checkpoint.init_from import Source, files
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.config import Config, DataConfig, UserError
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import to_checkpoint_layout
from ultrascale_jax.training.setup import make_loader, open_run

HF = Path(__file__).parents[1] / "data" / "hf" / "llama3"
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
    shutil.copytree(HF, folder)
    cfg, _ = parsed(f"finetune --init-from hf:{folder} --run-dir {tmp_path}/run")
    assert (cfg.model, cfg.data.tokenizer) == (read_config(HF), "bytes")
    assert cfg.train.init_from == f"hf:{folder}"
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    cfg, _ = parsed(
        f"finetune --train.init-from hf:{folder} --log.run-dir {tmp_path}/run --model.rope-theta 7"
    )
    assert cfg.data.tokenizer == f"{tmp_path}/run/tokenizer.json"
    assert cfg.model.rope_theta == 7 and cfg.model.d_ff == read_config(HF).d_ff


def test_a_source_names_one_checkpoint_also_where_a_folder_has_the_name_of_a_step(tmp_path):
    for name in ("run/checkpoints/7", "run@7/checkpoints/3"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(UserError, match="there is no such folder; write hf:DIR"):
        Source.parse("x" * 5000)
    with pytest.raises(UserError, match=r"run@7 and .*/run are both folders"):
        Source.parse(f"{tmp_path}/run@7")
    for typed, text in {"run@7/": "run@7@3", "run/": "run/@7", "run/@7": "run/@7"}.items():
        source = Source.parse(f"{tmp_path}/{typed}").pinned()
        assert source.text == f"{tmp_path}/{text}" and Source.parse(source.text) == source


def opened(words, save_step=None):
    """Step and parameters, as in checkpoints, with which a run of this command begins, and its config."""
    cfg, _ = parsed(words)
    cfg = cfg.check(8)
    with open_run(cfg, make_mesh(cfg.mesh), hooks=(), profile=None, faults=None) as run:
        params = to_checkpoint_layout(run.state.params, run.state.params.layer_order_of)
        if save_step is not None:
            meta = describe(run.cfg, save_step, make_loader(run.cfg).fingerprint)
            with Checkpoints(run.cfg) as checkpoints:
                checkpoints.save(run.state, meta, wait=True)
        return run.step, run.cfg, params


# test_finetune.py begins a run with a folder, and resumes it.
@pytest.mark.wide
def test_a_run_begins_there_once_and_another_begins_with_its_checkpoint(tmp_path):
    folder, first, second = (tmp_path / name for name in ("hf", "first", "second"))
    shutil.copytree(HF, folder)
    words = f"{TINY} --mesh fsdp=2,dp=4 --init-from hf:{folder} --run-dir {first}"
    step, cfg, params = opened(words, save_step=2)
    assert (step, cfg.train.init_from) == (0, f"hf:{folder}")
    original = load_file(HF / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(params.embed[...]), original)
    shutil.rmtree(folder)  # a run that goes on needs it no more
    assert opened(words)[0] == 2
    with pytest.raises(UserError, match=r"train.init_from: saved 'hf:.*', now ''"):
        opened(words.replace(f"--init-from hf:{folder}", ""))
    words = "--mesh pp=2,fsdp=2,sp=2 --train.microbatches 2"
    step, cfg, same = opened(f"{TINY} {words} --init-from {first} --run-dir {second}")
    assert (step, cfg.train.init_from) == (0, f"{first}@2")
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
