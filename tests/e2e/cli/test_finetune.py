"""Fine-tuning by commands: adapters begin on a checkpoint, resume exactly, and leave merged or in PEFT's format."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import checkpoints
from tests.commands import refused, ultrascale
from tests.pairs import write_pairs
from tests.paths import HF
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.huggingface.adapters import save_adapters
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.training.setup import make_loader, open_run

FOLDER = HF / "llama3"
LORA = "4 --train.lora.alpha 8 --train.lora.rslora --train.lora.targets q_proj o_proj down_proj"
TINY = "debug --data.source synthetic --data.seq-len 64 --train.global-batch 8 --mesh fsdp=2"


def opened(words):
    cfg, _ = command_line.parse(words.split(), prog="test", options=train.Options)
    cfg = cfg.check(2)
    return open_run(cfg, make_mesh(cfg.mesh, jax.devices()[:2]), hooks=(), profile=None)


def random(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding), tree
    )


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def save(run):
    """Save the run at step 3 with random parameters, and return these."""
    state = dataclasses.replace(run.state, params=random(run.state.params))
    checkpoints.save(run.cfg, state, 3, fingerprint=make_loader(run.cfg).fingerprint)
    return state.params


def assert_equal(tree, expected):
    for mine, theirs in zip(leaves(tree), leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)


OTHER_MESH = "fsdp=2", "tp=2"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of adapters that stands at step 3, and the words that began it."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(FOLDER, folder / "hf")
    words = f"{TINY} --train.init-from hf:{folder}/hf --train.lora.rank {LORA} --log.run-dir {folder}/run"
    words += " --train.precision fp8"  # the base rests in it
    with opened(words) as run:
        assert run.step == 0 and not np.any(np.asarray(run.state.params.stacks[0].attn.lora.w_q.b))
        expected = leaves(save(run))
    return folder / "run", words, expected


def test_adapters_resume_exactly_on_the_base_where_they_began(run_dir):
    _, words, expected = run_dir
    with opened(words.replace(*OTHER_MESH)) as run:
        assert run.step == 3
        assert_equal(run.state.params, expected)
        embed = np.asarray(run.state.frozen.embed[...].astype("float32"))
        mlp = run.state.frozen.stacks[0].mlp
        rests, amaxes = (np.asarray(m.w_down[...], np.float32) for m in (mlp, mlp.amaxes))
    stored = {
        name: np.asarray(x.astype(jnp.bfloat16), np.float32)
        for name, x in load_file(FOLDER / "model.safetensors").items()
    }
    np.testing.assert_array_equal(embed, stored["model.embed_tokens.weight"])
    for layer, (values, amax) in enumerate(zip(rests, amaxes, strict=True)):
        weight = stored[f"model.layers.{layer}.mlp.down_proj.weight"].T
        assert amax == np.abs(weight).max()
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        # Three bits after the first one: at most 1/16 is lost, of numbers that are not below the smallest normal one.
        np.testing.assert_allclose(values * scale, weight, rtol=1 / 16, atol=scale * 2**-10)
    with pytest.raises(UserError, match=r"train.lora.rank: saved 4, now 8"):
        with opened(words.replace(LORA, "8")):
            pass


def test_an_export_merges_them_or_has_them_as_peft_names_them(run_dir, tmp_path, capsys):
    run, *_ = run_dir
    full, peft = tmp_path / "full", tmp_path / "peft"
    ultrascale("convert-hf", run, full, "--dtype", "float32")
    ultrascale("convert-hf", run, peft, "--dtype", "float32", "--adapters")
    config = json.loads((peft / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "use_rslora": True}
    assert expected.items() <= config.items()
    assert config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert config["base_model_name_or_path"] == str(run.parent / "hf")
    base, merged = (load_file(place / "model.safetensors") for place in (FOLDER, full))
    adapters = load_file(peft / "adapter_model.safetensors")
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        value = weight.astype(np.float32)
        if (a := adapters.pop(f"{stem}.lora_A.weight", None)) is not None:
            value += 8 / 4**0.5 * adapters.pop(f"{stem}.lora_B.weight") @ a
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not adapters
    assert "already holds something" in refused(capsys, "convert-hf", run, peft, "--adapters")
    cfg, adapted = load_params(run, make_mesh(MeshConfig(), jax.devices()[:1]), merge=False)
    save_adapters(adapted, cfg.model, cfg.train.lora, tmp_path / "phi3", base="", model_type="phi3")
    stem = "base_model.model.model.layers.0.self_attn"
    of_queries = load_file(peft / "adapter_model.safetensors")[f"{stem}.q_proj.lora_B.weight"]
    joined = load_file(tmp_path / "phi3/adapter_model.safetensors")[
        f"{stem}.qkv_proj.lora_B.weight"
    ]
    queries, others = np.split(joined, [len(of_queries)])
    np.testing.assert_array_equal(queries, of_queries)
    assert len(others) and not others.any()


def test_the_reference_is_loaded_anew_where_the_run_began(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "hf")
    source = write_pairs(tmp_path / "pairs", vocab_size=256)
    words = f"{TINY} --train.init-from hf:{tmp_path}/hf --train.dpo.beta 0.1 --log.run-dir {tmp_path}/run"
    words = words.replace("synthetic", source)
    with opened(words) as run:
        for mine, theirs in zip(
            *map(jax.tree.leaves, (run.state.params, run.state.reference)), strict=True
        ):
            assert mine is not theirs  # a step reuses the memory of both
            np.testing.assert_array_equal(mine.astype(theirs.dtype), theirs)
        expected, reference = leaves(save(run)), leaves(run.state.reference)
    with opened(words.replace(*OTHER_MESH)) as run:
        assert run.step == 3
        assert_equal(run.state.params, expected)
        assert_equal(run.state.reference, reference)
    cfg, params = load_params(tmp_path / "run", make_mesh(MeshConfig.of(pp=2), jax.devices()[:2]))
    assert not cfg.train.dpo.enabled  # any mesh reads it
    assert_equal(params, expected)
    with pytest.raises(UserError, match=r"train.dpo.beta: saved 0.1, now 0.2"):
        with opened(words.replace("beta 0.1", "beta 0.2")):
            pass


def test_a_teacher_of_another_size_is_loaded_anew_from_its_folder(tmp_path):
    words = f"{TINY} --train.distill.teacher hf:{FOLDER} --log.run-dir {tmp_path}/run"
    embed = load_file(FOLDER / "model.safetensors")["model.embed_tokens.weight"]
    with opened(words) as run:
        expected = leaves(save(run))
        assert run.cfg.model.num_layers != run.cfg.train.distill.model.num_layers
    with opened(words.replace(*OTHER_MESH)) as run:
        assert run.step == 3
        assert_equal(run.state.params, expected)
        np.testing.assert_array_equal(
            run.state.reference.embed[...].astype("float32"), embed.astype("float32")
        )


def test_modules_that_predict_ahead_are_left_out_of_a_run_without_them(tmp_path):
    words = f"{TINY} --model.num-layers 2"
    with opened(f"{words} --model.mtp-layers 1 --log.run-dir {tmp_path}/ahead") as run:
        expected = leaves(save(run).without_mtp())
    begin = f"--train.init-from {tmp_path}/ahead --log.run-dir {tmp_path}/tuned"
    with opened(f"{words} {begin} --model.mtp-layers 0") as run:
        assert_equal(run.state.params, expected)


def test_adapters_without_a_model_that_has_learned_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"train\.lora\.rank=2: .*give --train.init-from hf:DIR"):
        with opened(f"{TINY} --train.lora.rank 2 --log.run-dir {tmp_path}/run"):
            pass
