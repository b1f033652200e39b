"""Checkpoints go into any sharding and back without a change, and no more of them is read than needed."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ultrascale_jax.config import Config, MeshConfig, PipelineConfig, TrainConfig, parse_mesh
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.models import hf, hf_files
from ultrascale_jax.models.hf_config import read_config
from ultrascale_jax.training.state import abstract_state

FIXTURES = Path(__file__).parents[1] / "data" / "hf"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())
MESHES = ["dp=1", "fsdp=8", "fsdp=2,sp=2,tp=2", "dp=4,tp=2"]


def abstract(model, mesh="dp=1"):
    """What `load` fills on the first devices: the abstract parameters of `model` on this mesh."""
    sizes = MeshConfig(**({"fsdp": 1} | parse_mesh(mesh)))
    num_devices = int(np.prod(list(sizes.sizes.values())))
    cfg = Config(model=model, mesh=sizes).check(num_devices)
    return abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:num_devices])).params


def load(folder, mesh="dp=1"):
    return hf.load(folder, abstract(read_config(folder), mesh))


def stored(folder):
    """All tensors of a checkpoint, by name, as float32."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: value.astype(np.float32) for name, value in load_file(path).items()}
    return tensors


def in_hugging_face_layout(model, cfg):
    """The same from our parameters: written out here once more, independently of the table."""
    array = lambda parameter: np.asarray(parameter[...])  # noqa: E731
    tensors = {
        "model.embed_tokens.weight": array(model.embed),
        "model.norm.weight": array(model.final_norm),
    }
    if not cfg.tied_embeddings:
        tensors["lm_head.weight"] = array(model.head).T
    post = cfg.norm_placement == "post"
    first = "post_attention_layernorm" if post else "input_layernorm"
    second = "post_feedforward_layernorm" if post else "post_attention_layernorm"
    for layer in range(cfg.num_layers):
        at, blocks = f"model.layers.{layer}", model.blocks
        at_rest = model.layer_order.index(layer)
        row = lambda parameter, at_rest=at_rest: array(parameter)[at_rest]  # noqa: E731
        tensors[f"{at}.{first}.weight"] = row(blocks.attn_norm)
        tensors[f"{at}.{second}.weight"] = row(blocks.mlp_norm)
        for name in ("gate", "up", "down"):
            tensors[f"{at}.mlp.{name}_proj.weight"] = row(getattr(blocks.mlp, f"w_{name}")).T
        for name in ("q", "k", "v"):
            weight = row(getattr(blocks.attn, f"w_{name}")).reshape(cfg.d_model, -1).T
            tensors[f"{at}.self_attn.{name}_proj.weight"] = weight
            if cfg.qkv_bias:
                bias = row(getattr(blocks.attn, f"b_{name}")).reshape(-1)
                tensors[f"{at}.self_attn.{name}_proj.bias"] = bias
            if cfg.qk_norm != "none" and name != "v":
                scale = row(getattr(blocks.attn, f"{name}_norm")).reshape(-1)
                tensors[f"{at}.self_attn.{name}_norm.weight"] = scale
        weight = row(blocks.attn.w_o).reshape(-1, cfg.d_model).T
        tensors[f"{at}.self_attn.o_proj.weight"] = weight
    return tensors


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def copy(name, to):
    """A fixture in one file that a test may change: the folder and its tensors."""
    shutil.copytree(FIXTURES / name, to / name)
    return to / name, load_file(FIXTURES / name / "model.safetensors")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_checkpoint_lands_where_it_belongs(family, mesh):
    folder = FIXTURES / family
    cfg = read_config(folder)
    model, shapes = load(folder, mesh), abstract(cfg, mesh)
    jax.tree.map(lambda p, s: np.testing.assert_equal(p.sharding, s.sharding), model, shapes)
    assert_same_tensors(in_hugging_face_layout(model, cfg), stored(folder))


class CountingFile:
    """A safetensors file that counts the bytes of every slice taken from it."""

    taken: list[int]

    def __init__(self, path, framework):
        self.file = safe_open(path, framework=framework)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        view, taken = self.file.get_slice(name), self.taken

        class CountingSlice:
            get_shape, get_dtype = view.get_shape, view.get_dtype

            def __getitem__(self, where):
                value = view[where]
                taken.append(value.nbytes)
                return value

        return CountingSlice()


@pytest.mark.parametrize(("mesh", "parts"), [("fsdp=8", 8), ("fsdp=2,tp=4", 8), ("dp=8", 1)])
def test_each_byte_is_read_once_and_never_more_than_a_part_of_one_tensor(monkeypatch, mesh, parts):
    folder = FIXTURES / "llama3"
    monkeypatch.setattr(hf_files, "safe_open", CountingFile)
    monkeypatch.setattr(CountingFile, "taken", [], raising=False)
    model = load(folder, mesh)
    sizes = [value.nbytes for value in load_file(folder / "model.safetensors").values()]
    if mesh != "fsdp=2,tp=4":  # The two kv heads are whole on four devices: read for each D part.
        assert sum(CountingFile.taken) == sum(sizes)
    assert max(CountingFile.taken) == max(sizes) // parts
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(model)) == sum(sizes)


def test_float16_and_bfloat16_become_the_wanted_type(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        low = {name: value.astype(dtype) for name, value in tensors.items()}
        save_file(low, folder / "model.safetensors")
        model = load(folder)
        assert model.embed.dtype == np.float32
        assert_same_tensors(in_hugging_face_layout(model, read_config(folder)), stored(folder))
    half = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, np.dtype("bfloat16"), sharding=s.sharding),
        abstract(read_config(folder)),
    )
    assert hf.load(folder, half).embed.dtype == np.dtype("bfloat16")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"layers\.1\.mlp\.up_proj.*missing"),
        ({"lm_head.weight": None}, r"lm_head\.weight.*missing"),
        ({"score.weight": (2, 64)}, r"score\.weight.*not part of this model"),
        ({"model.layers.2.mlp.up_proj.weight": (128, 64)}, r"layers\.2.*not part of this model"),
        ({"model.layers.0.self_attn.q_proj.bias": (64,)}, r"q_proj\.bias.*not part"),
        ({"model.norm.weight": (65,)}, r"model\.norm\.weight\.shape=\(65,\).*\(64,\)"),
        ({"model.norm.weight": (64, 1)}, r"model\.norm\.weight\.shape=\(64, 1\)"),
        ({"model.layers.0.mlp.up_proj.weight": (64, 128)}, r"up_proj.*\(64, 128\).*\(128, 64\)"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path, change, said):
    folder, tensors = copy("llama3", tmp_path)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_a_type_that_is_no_float_is_refused_by_name(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight\.dtype='I8'"):
        load(folder)


def test_a_config_of_another_shape_is_refused_by_our_name():
    other = dataclasses.replace(read_config(FIXTURES / "llama3"), d_ff=64)
    with pytest.raises(ValueError, match=r"blocks\.mlp\.w_gate\.shape=\(2, 64, 64\)"):
        hf.load(FIXTURES / "llama3", abstract(other))
    other = dataclasses.replace(read_config(FIXTURES / "llama3"), qkv_bias=True)
    with pytest.raises(ValueError, match=r"blocks\.attn\.b_k.*not in the config"):
        hf.load(FIXTURES / "llama3", abstract(other))


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    model = load(folder)
    assert_same_tensors(
        in_hugging_face_layout(model, read_config(folder)), stored(FIXTURES / "llama3")
    )


def test_a_tied_head_may_be_there_only_if_it_is_the_embedding(tmp_path):
    folder, tensors = copy("qwen3", tmp_path)
    embed = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embed}, folder / "model.safetensors")
    np.testing.assert_array_equal(np.asarray(load(folder).embed[...]), embed)
    save_file(tensors | {"lm_head.weight": embed + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(folder)


@pytest.mark.parametrize("mesh", ["dp=1", "fsdp=2,sp=2,tp=2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_was_read(tmp_path, family, mesh):
    folder, out = FIXTURES / family, tmp_path / "out"
    cfg = read_config(folder)
    hf.save(load(folder, mesh), cfg, out, dtype="float32")
    assert read_config(out) == cfg
    assert_same_tensors(stored(out), stored(folder))
    with safe_open(out / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_layers_go_where_a_pipeline_has_them_and_come_back(tmp_path):
    folder = FIXTURES / "qwen2"
    cfg = read_config(folder)
    pipeline = Config(
        model=cfg,
        mesh=MeshConfig(pp=2, fsdp=2, tp=2),
        pp=PipelineConfig(schedule="interleaved"),
        train=TrainConfig(microbatches=2),
    )
    shapes = abstract_state(pipeline, make_mesh(pipeline.mesh)).params
    assert shapes.layer_order == (0, 2, 1, None)
    model = hf.load(folder, shapes)
    jax.tree.map(lambda p, s: np.testing.assert_equal(p.sharding, s.sharding), model, shapes)
    assert_same_tensors(in_hugging_face_layout(model, cfg), stored(folder))
    assert not any(np.asarray(leaf)[3].any() for leaf in jax.tree.leaves(model.blocks))
    hf.save(model, cfg, tmp_path / "out", dtype="float32")
    assert_same_tensors(stored(tmp_path / "out"), stored(folder))


def test_shards_stay_under_their_size_and_the_index_names_every_tensor(tmp_path):
    folder, out, limit = FIXTURES / "llama3", tmp_path / "out", 40_000
    cfg = read_config(folder)
    hf.save(load(folder, "fsdp=8"), cfg, out, dtype="bfloat16", max_shard_bytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = stored(folder)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(value.size * 2 for value in tensors.values())
    files = sorted(out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for path in files:
        contents = load_file(path)
        assert all(value.dtype == ml_dtypes.bfloat16 for value in contents.values())
        assert len(contents) == 1 or sum(v.nbytes for v in contents.values()) <= limit
    rounded = {k: v.astype(ml_dtypes.bfloat16).astype(np.float32) for k, v in tensors.items()}
    assert_same_tensors(in_hugging_face_layout(load(out, "tp=2,dp=4"), cfg), rounded)


def test_a_folder_that_holds_something_is_not_touched(tmp_path):
    cfg = read_config(FIXTURES / "llama3")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"path=.*already holds something"):
        hf.save(load(FIXTURES / "llama3"), cfg, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_that_fails_leaves_no_folder_and_the_next_one_succeeds(tmp_path, monkeypatch):
    cfg, out = read_config(FIXTURES / "llama3"), tmp_path / "out"
    model = load(FIXTURES / "llama3")

    def full_disk(contents, path, metadata):
        if "00002" in path.name:
            raise OSError("No space left on device")
        save_file(contents, path, metadata=metadata)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(hf, "save_file", full_disk)
        hf.save(model, cfg, out, max_shard_bytes=40_000)
    assert not out.exists()
    hf.save(model, cfg, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_that_no_family_computes_is_refused_before_anything_is_written(tmp_path):
    cfg = dataclasses.replace(read_config(FIXTURES / "llama3"), norm_placement="post")
    with pytest.raises(ValueError, match="norm_placement"):
        hf.save(load(FIXTURES / "llama3"), cfg, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
