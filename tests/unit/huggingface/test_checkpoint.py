"""Of a checkpoint no more is read than needed, and what is not exactly its model is refused by name."""

import json
import shutil
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.hf_layout import abstract, assert_same_tensors, changed, load, saved, stored
from tests.paths import HF
from ultrascale_jax.config import UserError
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface import files as hf_files
from ultrascale_jax.huggingface.config import read_config

LLAMA3 = HF / "llama3"
TENSORS = load_file(LLAMA3 / "model.safetensors")


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
    monkeypatch.setattr(hf_files, "safe_open", CountingFile)
    monkeypatch.setattr(CountingFile, "taken", [], raising=False)
    model = load(LLAMA3, mesh)
    sizes = [value.nbytes for value in TENSORS.values()]
    if mesh != "fsdp=2,tp=4":  # The two kv heads are whole on four devices: read for each D part.
        assert sum(CountingFile.taken) == sum(sizes)
    assert max(CountingFile.taken) == max(sizes) // parts
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(model)) == sum(sizes)


def in_type(folder, dtype):
    """The abstract parameters of a folder in another type."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, np.dtype(dtype), sharding=s.sharding),
        abstract(read_config(folder)),
    )


def test_float16_and_bfloat16_become_the_wanted_type(tmp_path):
    for dtype in (np.float16, ml_dtypes.bfloat16):
        low = {name: value.astype(dtype) for name, value in TENSORS.items()}
        folder = changed("llama3", tmp_path / np.dtype(dtype).name, low)
        model = load(folder)
        assert model.embed.dtype == np.float32
        assert_same_tensors(saved(model, tmp_path / f"{folder.name}_out"), stored(folder))
    half = checkpoint.load(LLAMA3, in_type(LLAMA3, "bfloat16"))
    assert half.embed.dtype == np.dtype("bfloat16")


LAYER = "model.layers.1."
EXPERTS = "model.layers.0.mlp.experts."
MTP = "model.layers.3."
BLOCKS = {
    f"{EXPERTS}gate_up_proj": None,
    f"{EXPERTS}gate_up_proj_blocks": np.zeros((4, 64, 1, 16), np.uint8),
    f"{EXPERTS}gate_up_proj_scales": np.zeros((4, 64, 1), np.uint8),
}
REFUSED = [
    # Missing, unknown and misshapen tensors.
    ("llama3", {f"{LAYER}mlp.up_proj.weight": None}, r"layers\.1\.mlp\.up_proj.*missing"),
    ("llama3", {"score.weight": (2, 64)}, r"score\.weight.*not part of this model"),
    ("llama3", {f"{LAYER}mlp.up_proj.weight": (64, 128)}, r"up_proj.*\(64, 128\).*\(128, 64\)"),
    ("llama3", {"model.norm.weight": np.ones(64, np.int8)}, r"model\.norm\.weight\.dtype='I8'"),
    # Unknown ones are told before those that are missing, as where one was renamed.
    (
        "llama3",
        {"gate_up": (2,), f"{LAYER}mlp.up_proj.weight": None},
        rf"^tensors=\['gate_up'\]: not part .* lacks \['{LAYER}mlp.up_proj.weight'\]",
    ),
    # A vocabulary that is padded in the tensors alone.
    (
        "llama3",
        {"model.embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64)},
        r'embed_tokens.*\(320, 64\): .*write "vocab_size": 320',
    ),
    # Experts and latent attention.
    ("deepseek_v3", {"model.layers.2.mlp.experts.7.up_proj.weight": None}, "experts.7.*missing"),
    # The module of multi-token prediction.
    ("deepseek_v3", {f"{MTP}eh_proj.weight": None}, r"layers\.3\.eh_proj.*missing"),
    ("deepseek_v3", {f"{MTP}embed_tokens.weight": (64, 32)}, "differs from model.embed_tokens"),
    ("deepseek_v3", {f"{MTP}shared_head.head.weight": (64, 32)}, "differs from lm_head.*share it"),
    # Blocks of MXFP4.
    ("gpt_oss", BLOCKS | {f"{EXPERTS}gate_up_proj_scales": (4, 64, 2)}, "blocks=.*must be bytes"),
    ("gpt_oss", BLOCKS | {f"{EXPERTS}gate_up_proj": (4, 32, 64)}, "gate_up_proj.*one of the two"),
]


@pytest.mark.parametrize(("family", "tensors", "said"), REFUSED)
def test_tensors_that_are_not_exactly_the_models_are_refused_by_name(
    tmp_path, family, tensors, said
):
    with pytest.raises(UserError, match=said):
        load(changed(family, tmp_path / "hf", tensors))


@pytest.mark.parametrize("prefix", ["_orig_mod.model.", "language_model.model.", ""])
def test_tensors_that_a_wrapper_renamed_are_named_with_their_prefix(tmp_path, prefix):
    renamed = {f"{prefix}{name.removeprefix('model.')}": value for name, value in TENSORS.items()}
    said = f"begin with '{prefix}'" if prefix else "have no prefix"
    with pytest.raises(UserError, match=rf"^tensors=.*: {said} where this family has 'model\.'"):
        load(changed("llama3", tmp_path / "hf", dict.fromkeys(TENSORS) | renamed))


def test_tensors_that_say_nothing_may_be_there_or_missing(tmp_path):
    copies = [f"{MTP}{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    for family, tensors in (
        ("llama3", {f"{LAYER}self_attn.rotary_emb.inv_freq": (8,)}),
        ("deepseek_v3", dict.fromkeys(copies)),
    ):
        folder = changed(family, tmp_path / family, tensors)
        assert_same_tensors(saved(load(folder), tmp_path / f"{family}_out"), stored(HF / family))


@pytest.mark.parametrize(
    ("family", "value", "dtype"),
    [
        ("llama3", np.nan, np.float32),
        ("llama3", np.inf, np.float16),
        ("mixtral", np.nan, np.float32),
    ],
)
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, family, value, dtype):
    tensors = load_file(HF / family / "model.safetensors")
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    name = sorted(tensors)[-2]  # of the last layer
    tensors[name][..., -1] = value
    with pytest.raises(UserError, match=rf"^{name}={value}: a weight must be finite in float32"):
        load(changed(family, tmp_path / "hf", tensors), "fsdp=8")


def test_a_weight_that_another_type_cannot_hold_is_neither_read_nor_written_in_it(tmp_path):
    name = f"{LAYER}mlp.down_proj.weight"
    weight = TENSORS[name].copy()
    weight[3, 5] = 3.4e38  # beyond bfloat16
    folder = changed("llama3", tmp_path / "hf", {name: weight})
    with pytest.raises(UserError, match=rf"^{name}=inf: a weight must be finite in float16"):
        checkpoint.load(folder, in_type(folder, "float16"))
    model, cfg = load(folder), read_config(folder)
    with pytest.raises(UserError, match=rf"^{name}=inf: .*bfloat16"):
        checkpoint.save(model, cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    checkpoint.save(model, cfg, tmp_path / "out", dtype="float32")


def test_a_config_of_another_shape_is_refused_by_our_name():
    cfg = read_config(LLAMA3)
    for other, said in (
        (replace(cfg, d_ff=64), r"stacks\.0\.mlp\.w_gate\.shape=\(2, 64, 64\)"),
        (replace(cfg, qkv_bias=True), r"stacks\.0\.attn\.b_k.*not in the config"),
    ):
        with pytest.raises(UserError, match=said):
            checkpoint.load(LLAMA3, abstract(other))


def test_a_tied_head_may_be_there_only_if_it_is_the_embedding(tmp_path):
    stored = load_file(HF / "qwen3" / "model.safetensors")["model.embed_tokens.weight"]
    embed = np.resize(stored, (4100, stored.shape[1]))
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": embed}
    folder = changed("qwen3", tmp_path / "hf", tensors, vocab_size=4100)
    np.testing.assert_array_equal(np.asarray(load(folder).embed[...]), embed)
    for row in (0, 4095, 4096, 4099):  # they are compared in pieces of 4,096 rows
        head = embed.copy()
        head[row, -1] += 1
        folder = changed(
            "qwen3", tmp_path / str(row), tensors | {"lm_head.weight": head}, vocab_size=4100
        )
        with pytest.raises(UserError, match=r"lm_head\.weight.*tie_word_embeddings"):
            load(folder)


MXFP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def packed(rng, experts, columns, rows):
    """A matrix in MXFP4, and the numbers that it is, one by one."""
    blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
    scales = rng.integers(118, 124, blocks.shape[:3], dtype=np.uint8)
    whole = np.zeros((experts, columns, rows), np.float32)
    for (e, row, block, place), byte in np.ndenumerate(blocks):
        for half, bits in enumerate((byte % 16, byte // 16)):
            value = MXFP4[bits] * 2.0 ** (int(scales[e, row, block]) - 127)
            whole[e, 32 * block + 2 * place + half, row] = value
    return {"_blocks": blocks, "_scales": scales}, whole


def test_experts_in_mxfp4_are_read_as_the_numbers_that_they_are(tmp_path):
    tensors = load_file(HF / "gpt_oss" / "model.safetensors")
    rng, in_file = np.random.default_rng(0), dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        parts, tensors[name] = packed(rng, *tensors[name].shape)
        in_file |= {name: None} | {name + part: value for part, value in parts.items()}
    folder = changed("gpt_oss", tmp_path / "hf", in_file)
    for mesh in ("dp=1", "ep=2,fsdp=2,tp=2"):
        model = load(folder, mesh)
        assert_same_tensors(saved(model, tmp_path / mesh), tensors)
    parts["_scales"][1, 2, 0] = 255  # stands for NaN
    folder = changed("gpt_oss", tmp_path / "nan", in_file | {f"{name}_scales": parts["_scales"]})
    with pytest.raises(UserError, match=rf"^{name}=nan: a weight must be finite"):
        load(folder)


def test_a_bias_of_experts_stays_float32_and_comes_back_bit_for_bit(tmp_path):
    folder, out = HF / "deepseek_v3", tmp_path / "out"
    checkpoint.save(load(folder), read_config(folder), out, dtype="bfloat16")
    before, after = (load_file(at / "model.safetensors") for at in (folder, out))
    name = f"{LAYER}mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(after[name], before[name])
    kept = {name for name, value in after.items() if value.dtype == np.float32}
    assert kept == {name.replace("layers.1", f"layers.{layer}") for layer in (1, 2, 3)}


def test_a_model_without_modules_of_multi_token_prediction_leaves_those_of_a_folder_out(tmp_path):
    folder, out = HF / "deepseek_v3", tmp_path / "out"
    cfg = replace(read_config(folder), mtp_layers=0)
    kept = {n: v for n, v in stored(folder).items() if not n.startswith(MTP)}
    assert_same_tensors(saved(checkpoint.load(folder, abstract(cfg)), out), kept)
    assert read_config(out) == cfg
    # As transformers writes it: config.json promises a module that the files lack.
    shutil.copy(folder / "config.json", out)
    assert read_config(out) == cfg
    with pytest.raises(UserError, match=r"layers\.3\..*missing from the checkpoint"):
        checkpoint.load(out, abstract(read_config(folder)))


def test_shards_stay_under_their_size_and_the_index_names_every_tensor(tmp_path):
    out, limit, cfg = tmp_path / "out", 40_000, read_config(LLAMA3)
    checkpoint.save(load(LLAMA3, "fsdp=8"), cfg, out, dtype="bfloat16", max_shard_bytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    assert index["metadata"]["total_size"] == sum(value.size * 2 for value in TENSORS.values())
    files = sorted(out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for path in files:
        contents = load_file(path)
        assert all(value.dtype == ml_dtypes.bfloat16 for value in contents.values())
        assert len(contents) == 1 or sum(v.nbytes for v in contents.values()) <= limit
    rounded = {k: v.astype(ml_dtypes.bfloat16).astype(np.float32) for k, v in TENSORS.items()}
    assert_same_tensors(saved(load(out, "tp=2,dp=4"), tmp_path / "again"), rounded)


def test_a_save_that_cannot_be_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    cfg, out, model = read_config(LLAMA3), tmp_path / "out", load(LLAMA3)

    def full_disk(contents, path, metadata):
        if "00002" in path.name:
            raise OSError("No space left on device")
        save_file(contents, path, metadata=metadata)

    with pytest.raises(UserError, match="norm_placement"):
        checkpoint.save(model, replace(cfg, norm_placement="post"), out)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(checkpoint, "save_file", full_disk)
        checkpoint.save(model, cfg, out, max_shard_bytes=40_000)
    assert not out.exists()
    checkpoint.save(model, cfg, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(UserError, match=r"path=.*already holds something"):
        checkpoint.save(model, cfg, out)
