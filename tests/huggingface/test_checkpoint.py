"""Checkpoints go into any sharding and back without a change, and no more of them is read than needed."""

import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ultrascale_jax.config import Config, MeshConfig, PipelineConfig, TrainConfig, UserError
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface import files as hf_files
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state

FIXTURES = Path(__file__).parents[1] / "data" / "hf"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())
MESHES = ["dp=1", "fsdp=2,sp=2,tp=2", "fsdp=8", "dp=4,tp=2"]
WITH_EXPERTS = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"]
SPLIT_AS_OTHERS = ["llama2", "mistral", "mixtral", "qwen3", "smollm2"]
"""Llama3, qwen2, qwen3_moe, olmo2 and deepseek_v3 have every kind of tensor between them."""
wide = functools.partial(pytest.param, marks=pytest.mark.wide)


@functools.cache
def abstract(model, mesh):
    """Return the abstract parameters of `model` on this mesh, which `load` fills on the first devices."""
    sizes = MeshConfig.parse(mesh)
    num_devices = int(np.prod(list(sizes.sizes.values())))
    cfg = Config(model=model, mesh=sizes).check(num_devices)
    return abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:num_devices])).params


def load(folder, mesh="dp=1"):
    return checkpoint.load(folder, abstract(read_config(folder), mesh))


def stored(folder):
    """All tensors of a checkpoint, by name, as float32."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: value.astype(np.float32) for name, value in load_file(path).items()}
    return tensors


def in_hugging_face_layout(model, cfg):
    """The same from our parameters: written out here once more, independently of the table."""
    array = lambda parameter: np.asarray(parameter[...])  # noqa: E731
    both = cfg.norm_placement == "both"  # Gemma: its norms multiply by 1 + weight
    tensors = {
        "model.embed_tokens.weight": array(model.embed),
        "model.norm.weight": array(model.final_norm) - both,
    }
    if not cfg.tied_embeddings:
        tensors["lm_head.weight"] = array(model.head).T
    post = cfg.norm_placement == "post"
    first = "post_attention_layernorm" if post else "input_layernorm"
    second = "post_feedforward_layernorm" if post else "post_attention_layernorm"
    norms = {first: "attn_norm", second: "mlp_norm"}
    if both:
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        ours = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
        norms = {f"{name}_layernorm": own for name, own in zip(names, ours, strict=True)}
    for layer in range(cfg.num_layers):
        at = f"model.layers.{layer}"

        def row(path, layer=layer):
            stack = next(i for i, layers in enumerate(cfg.stacks) if layer in layers)
            parameter = functools.reduce(getattr, path.split("."), model.stacks[stack])
            return array(parameter)[model.orders[stack].index(layer)]

        tensors |= {f"{at}.{name}.weight": row(own) - both for name, own in norms.items()}
        attention = grouped_attention if cfg.latent is None else latent_attention
        dense = layer < cfg.dense_layers
        feed_forward = gated("mlp.", row, "mlp.") if dense else experts(row, cfg)
        for name, value in (attention(row, cfg) | feed_forward).items():
            tensors[f"{at}.{name}"] = value
    for depth in range(cfg.mtp_layers):
        at = f"model.layers.{cfg.num_layers + depth}"
        module = {f"{at}.{name}": value for name, value in mtp_module(model, cfg, depth).items()}
        tensors |= module
    return tensors


def mtp_module(model, cfg, depth):
    module = model.mtp[depth]

    def row(path):
        return np.asarray(functools.reduce(getattr, path.split("."), module.block)[...])

    return {
        "enorm.weight": np.asarray(module.token_norm[...]),
        "hnorm.weight": np.asarray(module.hidden_norm[...]),
        "eh_proj.weight": np.asarray(module.w_join[...]).T,
        "shared_head.norm.weight": np.asarray(module.norm[...]),
        "shared_head.head.weight": np.asarray(model.head[...]).T,
        "embed_tokens.weight": np.asarray(model.embed[...]),
        "input_layernorm.weight": row("attn_norm"),
        "post_attention_layernorm.weight": row("mlp_norm"),
        **latent_attention(row, cfg),
        **experts(row, cfg),
    }


def grouped_attention(row, cfg):
    tensors = {"self_attn.o_proj.weight": row("attn.w_o").reshape(-1, cfg.d_model).T}
    if cfg.attention_sinks:  # gpt-oss
        tensors |= {"self_attn.sinks": row("attn.sinks"), "self_attn.o_proj.bias": row("attn.b_o")}
    for name in ("q", "k", "v"):
        weight = row(f"attn.w_{name}").reshape(cfg.d_model, -1).T
        tensors[f"self_attn.{name}_proj.weight"] = weight
        if cfg.qkv_bias:
            tensors[f"self_attn.{name}_proj.bias"] = row(f"attn.b_{name}").reshape(-1)
        if cfg.qk_norm != "none" and name != "v":
            weight = row(f"attn.{name}_norm").reshape(-1)
            tensors[f"self_attn.{name}_norm.weight"] = weight - (cfg.norm_placement == "both")
    return tensors


def latent_attention(row, cfg):
    latent = cfg.latent
    tensors = {
        "q_a_proj": row("attn.w_q_a").T,
        "q_a_layernorm": row("attn.q_a_norm"),
        "q_b_proj": row("attn.w_q_b").reshape(latent.q_rank, -1).T,
        "kv_a_proj_with_mqa": row("attn.w_kv_a").T,
        "kv_a_layernorm": row("attn.kv_a_norm"),
        "kv_b_proj": row("attn.w_kv_b").reshape(latent.kv_rank, -1).T,
        "o_proj": row("attn.w_o").reshape(-1, cfg.d_model).T,
    }
    return {f"self_attn.{name}.weight": value for name, value in tensors.items()}


def gated(ours, row, theirs, names=("gate_proj", "up_proj", "down_proj"), expert=()):
    parts = zip(("gate", "up", "down"), names, strict=True)
    return {f"{theirs}{name}.weight": row(f"{ours}w_{part}")[expert].T for part, name in parts}


def experts_together(row):
    """gpt-oss: all experts in one tensor, gate and up in turn."""
    pairs = {"gate_up_proj": ("w_gate", "w_up"), "gate_up_proj_bias": ("b_gate", "b_up")}
    found = {"mlp.router.weight": row("moe.w_router").T, "mlp.router.bias": row("moe.b_router")}
    for name, (even, odd) in pairs.items():
        even, odd = row(f"moe.{even}"), row(f"moe.{odd}")
        whole = np.zeros((*even.shape[:-1], 2 * even.shape[-1]), even.dtype)
        whole[..., ::2], whole[..., 1::2] = even, odd
        found[f"mlp.experts.{name}"] = whole
    down = {"down_proj": row("moe.w_down"), "down_proj_bias": row("moe.b_down")}
    return found | {f"mlp.experts.{name}": value for name, value in down.items()}


def experts(row, cfg):
    if cfg.experts.biases:
        return experts_together(row)
    qwen_or_deepseek = cfg.qk_norm == "head" or cfg.latent is not None
    at = "mlp" if qwen_or_deepseek else "block_sparse_moe"
    tensors = {f"{at}.gate.weight": row("moe.w_router").T}
    for expert in range(cfg.experts.num):
        names = ("gate_proj", "up_proj", "down_proj") if qwen_or_deepseek else ("w1", "w3", "w2")
        tensors |= gated("moe.", row, f"{at}.experts.{expert}.", names, expert)
    if cfg.experts.bias:
        tensors["mlp.gate.e_score_correction_bias"] = row("moe.bias")
    if cfg.experts.shared:
        tensors |= gated("moe.shared.", row, "mlp.shared_experts.")
    return tensors


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def copy(name, to):
    """A fixture in one file that a test may change: the folder and its tensors."""
    shutil.copytree(FIXTURES / name, to / name)
    return to / name, load_file(FIXTURES / name / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        *itertools.product(FAMILIES, MESHES[:2]),
        # What these split as they do is in the rows of families that have the same kinds of tensors, and more.
        *(
            (wide if family in SPLIT_AS_OTHERS else pytest.param)(family, mesh)
            for family, mesh in itertools.product(FAMILIES, MESHES[2:])
        ),
        *((family, "ep=4,fsdp=2") for family in WITH_EXPERTS),
    ],
)
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
        abstract(read_config(folder), "dp=1"),
    )
    assert checkpoint.load(folder, half).embed.dtype == np.dtype("bfloat16")


def assert_refused(family, tmp_path, change, said):
    """The fixture with zeros of other shapes as these tensors, or without them, is refused in these words."""
    folder, tensors = copy(family, tmp_path)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load(folder)


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
    assert_refused("llama3", tmp_path, change, said)


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("_orig_mod.model.", "begin with '_orig_mod.model.'"),
        ("module.model.", "begin with 'module.model.'"),
        ("base_model.model.model.", "begin with 'base_model.model.model.'"),
        ("model._orig_mod.", "begin with 'model._orig_mod.'"),
        ("language_model.model.", "begin with 'language_model.model.'"),
        ("", "have no prefix"),
    ],
)
def test_tensors_that_a_wrapper_renamed_are_named_with_their_prefix(tmp_path, prefix, said):
    folder, tensors = copy("llama3", tmp_path)
    renamed = {f"{prefix}{name.removeprefix('model.')}": value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"^tensors=.*: {said} where this family has 'model\.'"):
        load(folder)


def test_tensors_that_are_unknown_are_told_before_those_that_are_missing(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({"gate_up": tensors.pop(name), **tensors}, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"^tensors=\['gate_up'\]: not part .* lacks \['{name}'\]"):
        load(folder)


def test_a_vocabulary_that_is_padded_in_the_tensors_alone_is_refused_with_its_size(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.pad(tensors[name], ((0, 64), (0, 0)))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r'embed_tokens.*\(320, 64\): .*write "vocab_size": 320'):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    assert load(folder).embed.shape == (320, 64)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("family", ["llama3", "mixtral"])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, family, value, dtype):
    folder, tensors = copy(family, tmp_path)
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    name = sorted(tensors)[-2]  # of the last layer
    tensors[name][..., -1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"^{name}={value}: a weight must be finite in float32"):
        load(folder, "fsdp=8")


def test_a_weight_that_the_wanted_type_cannot_hold_is_refused_by_name(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = 1e6
    save_file(tensors, folder / "model.safetensors")
    half = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, np.dtype("float16"), sharding=s.sharding),
        abstract(read_config(folder), "dp=1"),
    )
    with pytest.raises(UserError, match=rf"^{name}=inf: a weight must be finite in float16"):
        checkpoint.load(folder, half)
    assert np.max(load(folder).stacks[0].mlp.w_down[...]) == 1e6


def test_a_weight_that_is_not_finite_is_not_written(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 3.4e38  # beyond bfloat16
    save_file(tensors, folder / "model.safetensors")
    model, cfg = load(folder), read_config(folder)
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight=inf: .*bfloat16"):
        checkpoint.save(model, cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    checkpoint.save(model, cfg, tmp_path / "out", dtype="float32")


def test_a_type_that_is_no_float_is_refused_by_name(tmp_path):
    folder, tensors = copy("llama3", tmp_path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight\.dtype='I8'"):
        load(folder)


def test_a_config_of_another_shape_is_refused_by_our_name():
    other = dataclasses.replace(read_config(FIXTURES / "llama3"), d_ff=64)
    with pytest.raises(ValueError, match=r"stacks\.0\.mlp\.w_gate\.shape=\(2, 64, 64\)"):
        checkpoint.load(FIXTURES / "llama3", abstract(other, "dp=1"))
    other = dataclasses.replace(read_config(FIXTURES / "llama3"), qkv_bias=True)
    with pytest.raises(ValueError, match=r"stacks\.0\.attn\.b_k.*not in the config"):
        checkpoint.load(FIXTURES / "llama3", abstract(other, "dp=1"))


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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4100}))
    embed = np.resize(tensors["model.embed_tokens.weight"], (4100, config["hidden_size"]))
    tensors["model.embed_tokens.weight"] = embed
    save_file(tensors | {"lm_head.weight": embed}, folder / "model.safetensors")
    np.testing.assert_array_equal(np.asarray(load(folder).embed[...]), embed)
    for row in (0, 4095, 4096, 4099):  # they are compared in pieces of 4,096 rows
        head = embed.copy()
        head[row, -1] += 1
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings"):
            load(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        # The rows of the mesh imply those of one device, of which llama3 has one; DeepSeek's with experts split is
        # implied by its pipeline, which splits layers too.
        ("llama3", "dp=1"),
        *(wide(family, "dp=1") for family in FAMILIES if family != "llama3"),
        *((family, "fsdp=2,sp=2,tp=2") for family in FAMILIES),
        ("mixtral", "ep=4,fsdp=2"),
        ("qwen3_moe", "ep=4,fsdp=2"),
        wide("deepseek_v3", "ep=4,fsdp=2"),
    ],
)
def test_what_is_written_is_what_was_read(tmp_path, family, mesh):
    folder, out = FIXTURES / family, tmp_path / "out"
    cfg = read_config(folder)
    checkpoint.save(load(folder, mesh), cfg, out, dtype="float32")
    assert read_config(out) == cfg
    assert_same_tensors(stored(out), stored(folder))
    with safe_open(out / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("family", "axes", "orders"),
    [
        ("qwen2", {"fsdp": 2, "tp": 2}, ((0, 2, 1, None),)),
        ("deepseek_v3", {"ep": 2, "tp": 2}, ((0, None), (None, 2, 1, None))),
    ],
)
def test_layers_go_where_a_pipeline_has_them_and_come_back(tmp_path, family, axes, orders):
    folder = FIXTURES / family
    cfg = read_config(folder)
    pipeline = Config(
        model=cfg,
        mesh=MeshConfig(**{"pp": 2, "fsdp": 1} | axes),
        pp=PipelineConfig(schedule="interleaved"),
        train=TrainConfig(microbatches=2),
    )
    shapes = abstract_state(pipeline, make_mesh(pipeline.mesh)).params
    assert shapes.orders == orders
    model = checkpoint.load(folder, shapes)
    jax.tree.map(lambda p, s: np.testing.assert_equal(p.sharding, s.sharding), model, shapes)
    assert_same_tensors(in_hugging_face_layout(model, cfg), stored(folder))
    for stack, order in zip(model.stacks, model.orders, strict=True):
        padding = [layer is None for layer in order]
        for leaf in jax.tree.leaves(stack):
            assert len(padding) == len(leaf) and not np.asarray(leaf)[padding].any()
    checkpoint.save(model, cfg, tmp_path / "out", dtype="float32")
    assert_same_tensors(stored(tmp_path / "out"), stored(folder))


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


@pytest.mark.parametrize("mesh", ["dp=1", "ep=2,fsdp=2,tp=2"])
def test_experts_in_mxfp4_are_read_as_the_numbers_that_they_are(tmp_path, mesh):
    folder, tensors = copy("gpt_oss", tmp_path)
    rng, pairs = np.random.default_rng(0), dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        parts, tensors[name] = packed(rng, *tensors[name].shape)
        pairs |= {name + part: value for part, value in parts.items()}
        del pairs[name]
    save_file(pairs, folder / "model.safetensors")
    assert_same_tensors(in_hugging_face_layout(load(folder, mesh), read_config(folder)), tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gate_up_proj_scales": (4, 64, 2)}, r"gate_up_proj_blocks=.*must be bytes"),
        ({"gate_up_proj": (4, 32, 64)}, r"gate_up_proj.*one of the two"),
    ],
)
def test_blocks_that_are_no_mxfp4_are_refused_by_name(tmp_path, change, said):
    folder, tensors = copy("gpt_oss", tmp_path)
    first = "model.layers.0.mlp.experts."
    del tensors[f"{first}gate_up_proj"]
    tensors[f"{first}gate_up_proj_blocks"] = np.zeros((4, 64, 1, 16), np.uint8)
    tensors[f"{first}gate_up_proj_scales"] = np.zeros((4, 64, 1), np.uint8)
    tensors |= {first + name: np.zeros(shape, np.uint8) for name, shape in change.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_a_scale_of_mxfp4_that_stands_for_nan_is_refused_by_name(tmp_path):
    folder, tensors = copy("gpt_oss", tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    parts, _ = packed(np.random.default_rng(0), *tensors.pop(name).shape)
    parts["_scales"][1, 2, 0] = 255
    tensors |= {name + part: value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"^{name}=nan: a weight must be finite"):
        load(folder)


def test_a_bias_of_experts_stays_float32_and_comes_back_bit_for_bit(tmp_path):
    folder, out = FIXTURES / "deepseek_v3", tmp_path / "out"
    checkpoint.save(load(folder), read_config(folder), out, dtype="bfloat16")
    before, after = (load_file(at / "model.safetensors") for at in (folder, out))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(after[name], before[name])
    kept = {name for name, value in after.items() if value.dtype == np.float32}
    assert kept == {name.replace("layers.1", f"layers.{layer}") for layer in (1, 2, 3)}


def test_a_model_without_modules_of_multi_token_prediction_leaves_those_of_a_folder_out(tmp_path):
    folder = FIXTURES / "deepseek_v3"
    cfg = dataclasses.replace(read_config(folder), mtp_layers=0)
    kept = {n: v for n, v in stored(folder).items() if not n.startswith("model.layers.3.")}
    model = checkpoint.load(folder, abstract(cfg, "dp=1"))
    assert_same_tensors(in_hugging_face_layout(model, cfg), kept)
    checkpoint.save(model, cfg, tmp_path / "out", dtype="float32")
    assert read_config(tmp_path / "out") == cfg
    assert_same_tensors(stored(tmp_path / "out"), kept)
    # As transformers writes it: config.json promises a module that the files lack.
    shutil.copy(folder / "config.json", tmp_path / "out")
    assert read_config(tmp_path / "out") == cfg
    asked_for = abstract(read_config(folder), "dp=1")
    with pytest.raises(ValueError, match=r"layers\.3\..*missing from the checkpoint"):
        checkpoint.load(tmp_path / "out", asked_for)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.3.eh_proj.weight": None}, r"layers\.3\.eh_proj.*missing"),
        ({"model.layers.3.enorm.weight": (31,)}, r"enorm.*config.json makes it \(32,\)"),
        ({"model.layers.3.embed_tokens.weight": (64, 32)}, "differs from model.embed_tokens"),
        ({"model.layers.3.shared_head.head.weight": (64, 32)}, "differs from lm_head.*share it"),
        ({"model.layers.3.other.weight": (1,)}, r"layers\.3\.other.*not part of this model"),
    ],
)
def test_a_module_of_multi_token_prediction_that_is_not_ours_is_refused(tmp_path, change, said):
    folder, tensors = copy("deepseek_v3", tmp_path)
    tensors |= {name: shape and np.ones(shape, np.float32) for name, shape in change.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_copies_of_embedding_and_head_may_be_missing(tmp_path):
    folder, tensors = copy("deepseek_v3", tmp_path)
    for name in ("embed_tokens", "shared_head.head"):
        del tensors[f"model.layers.3.{name}.weight"]
    save_file(tensors, folder / "model.safetensors")
    original = stored(FIXTURES / "deepseek_v3")
    assert_same_tensors(in_hugging_face_layout(load(folder), read_config(folder)), original)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.2.mlp.experts.7.up_proj.weight": None}, r"layers\.2.*experts\.7.*missing"),
        ({"model.layers.1.mlp.experts.8.up_proj.weight": (16, 32)}, r"experts\.8.*not part"),
        ({"model.layers.0.mlp.experts.0.up_proj.weight": (16, 32)}, r"layers\.0.*not part"),
        ({"model.layers.1.mlp.gate.weight": (7, 32)}, r"gate\.weight\.shape=\(7, 32\).*\(8, 32\)"),
        (
            {"model.layers.1.self_attn.kv_b_proj.weight": (16, 112)},
            r"kv_b_proj.*\(16, 112\).*\(112, 16\)",
        ),
        (
            {"model.layers.1.mlp.shared_experts.down_proj.weight": (32, 16)},
            r"shared_experts.*\(32, 16\).*\(32, 32\)",
        ),
    ],
)
def test_tensors_of_experts_and_latents_that_do_not_fit_are_refused_by_name(tmp_path, change, said):
    assert_refused("deepseek_v3", tmp_path, change, said)


def test_shards_stay_under_their_size_and_the_index_names_every_tensor(tmp_path):
    folder, out, limit = FIXTURES / "llama3", tmp_path / "out", 40_000
    cfg = read_config(folder)
    checkpoint.save(load(folder, "fsdp=8"), cfg, out, dtype="bfloat16", max_shard_bytes=limit)
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
        checkpoint.save(load(FIXTURES / "llama3"), cfg, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_that_fails_leaves_no_folder_and_the_next_one_succeeds(tmp_path, monkeypatch):
    cfg, out = read_config(FIXTURES / "llama3"), tmp_path / "out"
    model = load(FIXTURES / "llama3")

    def full_disk(contents, path, metadata):
        if "00002" in path.name:
            raise OSError("No space left on device")
        save_file(contents, path, metadata=metadata)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(checkpoint, "save_file", full_disk)
        checkpoint.save(model, cfg, out, max_shard_bytes=40_000)
    assert not out.exists()
    checkpoint.save(model, cfg, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_that_no_family_computes_is_refused_before_anything_is_written(tmp_path):
    cfg = dataclasses.replace(read_config(FIXTURES / "llama3"), norm_placement="post")
    with pytest.raises(ValueError, match="norm_placement"):
        checkpoint.save(load(FIXTURES / "llama3"), cfg, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
