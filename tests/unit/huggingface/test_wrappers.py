"""The text model inside a vision-language checkpoint: its logits, and a way back that changes no other tensor."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.commands import refused, ultrascale
from tests.hf_layout import load
from tests.paths import DATA
from tests.runs import imported
from ultrascale_jax.config import Config, LogConfig, MeshConfig, TrainConfig, UserError
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import parse_config, read_config
from ultrascale_jax.huggingface.remarks import remarks
from ultrascale_jax.huggingface.wrappers import Names

VISION = DATA / "vision"
NAMES = sorted(folder.name for folder in VISION.iterdir())


def tensors(folder: Path) -> dict[str, np.ndarray]:
    files = (load_file(path) for path in folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in file.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_text_are_those_of_transformers_and_the_way_back_keeps_every_tensor(
    name, tmp_path
):
    folder, back = VISION / name, tmp_path / "back"
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    model, cfg = load(folder), read_config(folder)
    positions = np.broadcast_to(np.arange(expected["tokens"].shape[1]), expected["tokens"].shape)
    with jax.set_mesh(jax.tree.leaves(model)[0].sharding.mesh):
        logits = jax.jit(lambda model: model.logits(expected["tokens"], positions))(model)
        checkpoint.save(
            model, cfg, back, dtype="float32", max_shard_bytes=20_000,
            max_position_embeddings=64, wrapper_folder=folder,
        )  # fmt: skip
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)
    before, after = tensors(folder), tensors(back)
    assert before.keys() == after.keys()
    for stored, value in before.items():
        np.testing.assert_array_equal(after[stored], value, err_msg=stored)
    config, written = (json.loads((f / "config.json").read_text()) for f in (folder, back))
    assert written == config
    assert len([n for n in before if not Names.of(before).is_text(n)]) > 5


def test_a_run_goes_back_into_the_folder_where_it_began(tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(VISION / "qwen3_vl", source)
    (source / "preprocessor_config.json").write_text('{"size": 8}')
    cfg = Config(
        mesh=MeshConfig.of(fsdp=1),
        train=TrainConfig(init_from=f"hf:{source}"),
        log=LogConfig(run_dir=str(tmp_path / "run")),
    )
    imported(cfg, source)
    ultrascale("convert-hf", tmp_path / "run", out, "--dtype", "bfloat16")
    before, after = tensors(source), tensors(out)
    names = Names.of(before)
    for name, value in before.items():
        expected = value.astype(jnp.bfloat16) if names.is_text(name) else value
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
    config, written = (json.loads((f / "config.json").read_text()) for f in (source, out))
    assert written == config | {"dtype": "bfloat16"}
    assert (out / "preprocessor_config.json").read_text() == '{"size": 8}'
    shutil.rmtree(source)
    assert "there is no such folder" in refused(
        capsys, "convert-hf", tmp_path / "run", tmp_path / "x"
    )


def test_what_is_no_text_model_of_ours_is_refused(tmp_path):
    raw = json.loads((VISION / "mistral3" / "config.json").read_text())
    for changes, words in (
        ({"architectures": ["X"]}, r"architectures=\['X'\]: supported is \['Mistral3For"),
        ({"text_config": {"model_type": "x"}}, r"text_config\.model_type='x': supported are llama"),
        ({"text_config": []}, r"text_config=\[\]: must be an object"),
        ({"model_type": "mllama"}, r"model_type='mllama': supported are llama, .*, qwen3_vl"),
    ):
        with pytest.raises(UserError, match=words):
            parse_config(raw | changes)
    shutil.copytree(VISION / "gemma3", tmp_path / "x")
    stored = tensors(tmp_path / "x")
    del stored["language_model.model.embed_tokens.weight"]
    save_file(stored, tmp_path / "x" / "model.safetensors")
    with pytest.raises(UserError, match=r"has no embed_tokens\.weight after any of"):
        read_config(tmp_path / "x")


def test_keys_beside_those_of_the_text_and_absent_ones_are_read_as_transformers_does():
    raw = json.loads((VISION / "qwen2_5_vl" / "config.json").read_text())
    text = raw.pop("text_config")
    text.pop("layer_types")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    flat = text | raw | {"image_token_id": 3}  # as on the Hub
    nested = parse_config(json.loads((VISION / "qwen2_5_vl" / "config.json").read_text()))
    assert parse_config(flat) == nested
    few = {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    gemma = parse_config(
        {"model_type": "gemma3", "text_config": few | {"intermediate_size": 10240}}
    )
    assert (gemma.vocab_size, gemma.num_heads, gemma.head_dim) == (262208, 8, 256)
    assert gemma.rope_scaling is not None and gemma.rope_scaling.factor == 8


def test_remarks_are_about_the_text_model():
    assert remarks(VISION / "qwen3_vl") == remarks(VISION / "gemma3") == []
