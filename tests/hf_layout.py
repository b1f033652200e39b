"""Checkpoints of Hugging Face for tests: a changed copy, its tensors, and what tensors our parameters are."""

import functools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.paths import HF
from ultrascale_jax.config import Config, MeshConfig, ModelConfig
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state


@functools.cache
def abstract(model: ModelConfig, mesh: str = "dp=1") -> nnx.Module:
    """Return the abstract parameters of `model` on this mesh, which `load` fills on the first devices."""
    sizes = MeshConfig.parse(mesh)
    num_devices = int(np.prod(list(sizes.sizes.values())))
    cfg = Config(model=model, mesh=sizes).check(num_devices)
    return abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:num_devices])).params


def load(folder: Path, mesh: str = "dp=1") -> nnx.Module:
    """Return the parameters of a folder on this mesh."""
    return checkpoint.load(folder, abstract(read_config(folder), mesh))


def stored(folder):
    """All tensors of a checkpoint, by name, as float32."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: value.astype(np.float32) for name, value in load_file(path).items()}
    return tensors


def in_hugging_face_layout(model, cfg, model_type=""):
    """The same from our parameters: written out here once more, independently of the table."""
    if model_type == "nemotron_h":
        return halves(model, cfg)
    tensors = separate_tensors(model, cfg)
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        return apart(tensors, cfg)
    if model_type == "falcon_h1":
        pairs = (
            (".mlp.", ".feed_forward."),
            ("post_attention_", "pre_ff_"),
            ("l.norm", "l.final_layernorm"),
        )
        for old, new in pairs:
            tensors = {name.replace(old, new): value for name, value in tensors.items()}
    if model_type not in ("phi3", "granitemoehybrid"):
        return tensors
    whole = {}
    for name, value in tensors.items():
        if model_type == "phi3":
            name = re.sub(r"\.[qkv]_proj", ".qkv_proj", name)
            name = re.sub(r"\.(gate|up)_proj", ".gate_up_proj", name)
        else:
            name = name.replace(".shared_experts", "")
            name = re.sub(r"\.mlp\.(gate|up)_proj", ".shared_mlp.input_linear", name)
            name = name.replace(".mlp.down_proj", ".shared_mlp.output_linear")
            name = name.replace(".mlp.gate.", ".block_sparse_moe.router.layer.")
            if expert := re.search(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj", name):
                join = "output" if expert[1] == "down" else "input"
                name = name.replace(expert[0], f".block_sparse_moe.{join}_linear")
                whole[name] = [*whole.get(name, []), value]
                continue
        whole[name] = np.concatenate([whole[name], value]) if name in whole else value
    return {
        name: np.concatenate(value).reshape(cfg.experts.num, -1, value[0].shape[1])
        if isinstance(value, list)
        else value
        for name, value in whole.items()
    }


def halves(model, cfg):
    """Nemotron-H: each half of a layer is a layer there."""
    array = lambda parameter: np.asarray(parameter[...])  # noqa: E731
    tensors = {
        "backbone.embeddings.weight": array(model.embed)[: cfg.vocab_size],
        "backbone.norm_f.weight": array(model.final_norm),
        "lm_head.weight": array(model.head).T[: cfg.vocab_size],
    }
    number = 0
    for layer, (stack, place) in enumerate(model.rows):
        first = cfg.stacks[stack].start
        block = model.stacks[stack]
        if cfg.stacks[stack].step > 1:
            block = block.layers[(layer - first) % cfg.stacks[stack].step]

        def row(path, block=block, place=place):
            return array(functools.reduce(getattr, path.split("."), block))[place]

        for letter in cfg.kinds_of_layers[layer]:
            if letter == "M":
                mixer = {name.removeprefix("mamba."): v for name, v in mamba(row, cfg).items()}
            elif letter == "*":
                found = grouped_attention(row, cfg)
                mixer = {name.removeprefix("self_attn."): v for name, v in found.items()}
            else:
                mixer = without_gate(row, cfg, letter)
            mixer = {f"mixer.{name}": value for name, value in mixer.items()}
            mixer["norm.weight"] = row("attn_norm" if letter in "M*" else "mlp_norm")
            tensors |= {f"backbone.layers.{number}.{name}": v for name, v in mixer.items()}
            number += 1
    return tensors


def without_gate(row, cfg, letter):
    def pair(ours, theirs="", expert=()):
        names = ("up", "down")
        return {f"{theirs}{x}_proj.weight": row(f"{ours}.w_{x}")[expert].T for x in names}

    if letter == "-":
        return pair("mlp")
    found = {"gate.weight": row("moe.w_router").T}
    found["gate.e_score_correction_bias"] = row("moe.bias")
    for expert in range(cfg.experts.num):
        found |= pair("moe", f"experts.{expert}.", expert)
    return found | pair("moe.shared", "shared_experts.")


def zero_centred(cfg):
    """Whether norms multiply by 1 + weight: those of Gemma 3 and Qwen3-Next."""
    gemma3 = cfg.norm_placement == "both" and not cfg.value_norm
    return gemma3 or (cfg.linear is not None and cfg.linear.rule == "delta")


def separate_tensors(model, cfg):
    array = lambda parameter: np.asarray(parameter[...])  # noqa: E731
    # The norms of Gemma and Qwen3-Next multiply by 1 + weight.
    both = zero_centred(cfg)
    tensors = {
        "model.embed_tokens.weight": array(model.embed)[: cfg.vocab_size],
        "model.norm.weight": array(model.final_norm) - both,
    }
    if not cfg.tied_embeddings:
        tensors["lm_head.weight"] = array(model.head).T[: cfg.vocab_size]
    post = cfg.norm_placement == "post"
    first = "post_attention_layernorm" if post else "input_layernorm"
    second = "post_feedforward_layernorm" if post else "post_attention_layernorm"
    norms = {first: "attn_norm", second: "mlp_norm"}
    if cfg.norm_placement == "both":
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        ours = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
        norms = {f"{name}_layernorm": own for name, own in zip(names, ours, strict=True)}
    for layer in range(cfg.num_layers):
        at = f"model.layers.{layer}"

        def row(path, layer=layer):
            stack, number = model.rows[layer]
            row = model.stacks[stack]
            row = row.layers[layer % cfg.layer_group] if cfg.layer_group > 1 else row
            return array(functools.reduce(getattr, path.split("."), row))[number]

        tensors |= {f"{at}.{name}.weight": row(own) - both for name, own in norms.items()}
        attention = mixers(row, cfg, layer)
        dense = layer < cfg.dense_layers
        feed_forward = gated("mlp.", row, "mlp.") if dense else experts(row, cfg)
        if cfg.layer_scale:
            tensors[f"{at}.layer_scalar"] = row("scale")
        for name, value in (attention | feed_forward).items():
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
    for name in ("q", "k") if cfg.values_are_keys else ("q", "k", "v"):
        weight = row(f"attn.w_{name}").reshape(cfg.d_model, -1).T
        tensors[f"self_attn.{name}_proj.weight"] = weight
        if cfg.qkv_bias:
            tensors[f"self_attn.{name}_proj.bias"] = row(f"attn.b_{name}").reshape(-1)
        if cfg.qk_norm != "none" and name != "v":
            weight = row(f"attn.{name}_norm").reshape(-1)
            tensors[f"self_attn.{name}_norm.weight"] = weight - zero_centred(cfg)
    if cfg.output_gate:
        heads = [row(f"attn.w_{name}").transpose(1, 2, 0) for name in ("q", "gate")]
        tensors["self_attn.q_proj.weight"] = np.concatenate(heads, 1).reshape(-1, cfg.d_model)
    return tensors


def linear_attention(row, cfg):
    """Qwen3-Next: each head of keys has its rows of queries, keys, values and gates side by side."""
    heads = cfg.linear.key_heads
    names = {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}
    tensors = {
        name: np.concatenate(
            [np.moveaxis(row(f"attn.w_{part}"), 0, -1).reshape(heads, -1, cfg.d_model) for part in parts], 1
        ).reshape(-1, cfg.d_model)
        for name, parts in names.items()
    }  # fmt: skip
    taps = [row(f"attn.conv_{part}").reshape(-1, 1, cfg.linear.conv_kernel) for part in "qkv"]
    tensors |= {"conv1d": np.concatenate(taps), "norm": row("attn.scale")}
    tensors["out_proj"] = row("attn.w_o").reshape(-1, cfg.d_model).T
    vectors = {"A_log": row("attn.a_log"), "dt_bias": row("attn.dt_bias")}
    weights = {f"{name}.weight": value for name, value in tensors.items()}
    return {f"linear_attn.{name}": value for name, value in (weights | vectors).items()}


def mamba(row, cfg):
    """Granite 4: gates, values, keys, queries and time steps one below the other; keys are B, queries C."""

    def rows(name, parts, *rest):
        return np.concatenate([row(f"attn.{name}_{part}").reshape(-1, *rest) for part in parts])

    D, taps = cfg.d_model, cfg.linear.conv_kernel
    into = [np.moveaxis(row(f"attn.w_{part}"), 0, -1).reshape(-1, D) for part in "zvkqa"]
    tensors = {
        "in_proj.weight": np.concatenate(into),
        "conv1d.weight": rows("conv", "vkq", 1, taps),
        "conv1d.bias": rows("b", "vkq"),
        **({"norm.weight": row("attn.scale").reshape(-1)} if cfg.linear.norm else {}),
        "out_proj.weight": row("attn.w_o").reshape(-1, D).T,
        "A_log": row("attn.a_log"),
        "dt_bias": row("attn.dt_bias"),
        "D": row("attn.skip"),
    }
    return {f"mamba.{name}": value for name, value in tensors.items()}


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


def apart(tensors, cfg):
    """Qwen3.5: queries, keys and values one below the other, and all else in tensors of its own."""
    key, linear = cfg.linear.key_dim, cfg.linear
    value = linear.value_dim * linear.value_heads // linear.key_heads
    found = {}
    for name, tensor in tensors.items():
        if "in_proj" in name:
            heads = tensor.reshape(linear.key_heads, -1, cfg.d_model)
        if "in_proj_qkvz" in name:
            ends = [key, 2 * key, 2 * key + value]
            *qkv, z = (part.reshape(-1, cfg.d_model) for part in np.split(heads, ends, axis=1))
            found[name.replace("qkvz", "qkv")] = np.concatenate(qkv)
            found[name.replace("qkvz", "z")] = z
        elif "in_proj_ba" in name:
            for letter, part in zip("ba", np.split(heads, 2, axis=1), strict=True):
                found[name.replace("_ba", f"_{letter}")] = part.reshape(-1, cfg.d_model)
        else:
            found[name] = tensor
    return found


MIXERS = {
    "attention": grouped_attention,
    "latent": latent_attention,
    "delta": linear_attention,
    "mamba2": mamba,
}


SIDES = {"attention": "attn.attention.", "mamba2": "attn.linear."}


def mixers(row, cfg, layer):
    """One attention of a layer, or two, which have paths of their own."""
    kinds, one = cfg.mixers(layer), cfg.of_layer(layer)
    if len(kinds) == 1:
        return MIXERS[kinds[0]](row, one)
    tensors = {}
    for kind in kinds:
        tensors |= MIXERS[kind](
            lambda path, kind=kind: row(path.replace("attn.", SIDES[kind])), one
        )
    return tensors


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
    minimax = cfg.qk_norm == "full" and cfg.experts.bias
    plain = cfg.qk_norm == "none" and cfg.latent is None and not cfg.experts.shared  # Mixtral
    at = "block_sparse_moe" if minimax or plain else "mlp"
    names = ("w1", "w3", "w2") if minimax or plain else ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{at}.gate.weight": row("moe.w_router").T}
    for expert in range(cfg.experts.num):
        tensors |= gated("moe.", row, f"{at}.experts.{expert}.", names, expert)
    if cfg.experts.bias:
        tensors[f"{at if minimax else 'mlp.gate'}.e_score_correction_bias"] = row("moe.bias")
    if cfg.experts.shared_gate:
        tensors["mlp.shared_expert_gate.weight"] = row("moe.shared.w_score").T
    if cfg.experts.shared:
        name = "shared_expert" if cfg.experts.shared_gate else "shared_experts"
        tensors |= gated("moe.shared.", row, f"mlp.{name}.")
    return tensors


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def changed(family: str, folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    """Copy the checkpoint of a family to a new folder with these tensors; return the path.

    A tensor is an array, a shape of ones, or None to leave it out. `config` are keys of its config.json.
    """
    shutil.copytree(HF / family, folder)
    made = {**load_file(folder / "model.safetensors"), **tensors}
    arrays = {n: np.ones(v, np.float32) if isinstance(v, tuple) else v for n, v in made.items()}
    kept = {name: array for name, array in arrays.items() if array is not None}
    save_file(kept, folder / "model.safetensors")
    if config:
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | config))
    return folder
