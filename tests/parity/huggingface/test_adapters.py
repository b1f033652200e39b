"""Adapters of every projection, experts' too, leave as PEFT names them and merged; neither export loses a tensor."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf_layout import stored
from tests.paths import HF
from ultrascale_jax.config import Config, MeshConfig, MoEConfig, TrainConfig
from ultrascale_jax.config.lora import Lora, projections
from ultrascale_jax.config.pattern import half_numbers
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.adapters import PREFIX, save_adapters
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.models.layer_group import layers_of
from ultrascale_jax.models.lora import merged
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state

MODULES = {
    "deepseek_v3": [
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("mlp.gate_proj", "shared_experts.gate_proj", "mlp.up_proj", "shared_experts.up_proj"),
        *("mlp.down_proj", "shared_experts.down_proj", "gate_proj", "up_proj", "down_proj"),
    ],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w3", "w2"],
    "qwen3_next": [
        *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
        *("gate_proj", "up_proj", "down_proj"),
        *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    ],
}


FOLDED = "deepseek_v3", "gpt_oss"


def configured(family: str) -> Config:
    model = read_config(HF / family)
    lora = Lora(rank=4, alpha=6.0, targets=projections(model))
    train = TrainConfig(precision="fp32", lora=lora, init_from="hf:x")
    folding = family in FOLDED
    mesh = MeshConfig.of(ep=2, sp=2) if folding else MeshConfig.of(ep=2, tp=2)
    return Config(model=model, mesh=mesh, train=train, moe=MoEConfig(folding=folding)).check(4)


def random(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(0, 0.1, x.shape).astype(x.dtype), x.sharding), tree
    )


def exported(tmp_path: Path, family: str):
    """Export random adapters both ways; return the mesh, the adapters, the base, and the modules that peft drops."""
    cfg = configured(family)
    mesh = make_mesh(cfg.mesh, jax.devices()[:4])
    state = abstract_state(cfg, mesh)
    adapters, base = random(state.params), checkpoint.load(HF / family, state.frozen)
    name = json.loads((HF / family / "config.json").read_text())["model_type"]
    peft, full = tmp_path / "peft", tmp_path / "full"
    with jax.set_mesh(mesh):
        dropped = save_adapters(
            adapters, cfg.model, cfg.train.lora, peft, base="x", model_type=name
        )
        checkpoint.save(merged(adapters, base), cfg.model, full, dtype="float32", model_type=name)
    return mesh, adapters, base, dropped


@pytest.mark.parametrize("family", MODULES)
def test_both_exports_have_each_adapter(tmp_path, family):
    *_, dropped = exported(tmp_path, family)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    found = load_file(tmp_path / "peft/adapter_model.safetensors")
    saved = stored(tmp_path / "full")
    assert len(found) == 2 * len({name for name in found if ".lora_A." in name})
    for name, weight in stored(HF / family).items():
        stem = f"{PREFIX}{name.removesuffix('.weight')}"
        value = weight.astype(np.float32)
        if (a := found.pop(f"{stem}.lora_A.weight", None)) is not None:
            rank = config["rank_pattern"].get(module := stem.rpartition(".")[2], 4)
            scale = config["alpha_pattern"].get(module, 6) / rank
            assert len(a) == rank
            value = value + scale * found.pop(f"{stem}.lora_B.weight") @ a
        np.testing.assert_allclose(saved[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not found
    assert sorted(config["target_modules"]) == sorted(MODULES[family])
    assert dropped == [name for name in config["target_modules"] if "." in name]


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("gpt_oss", "model.layers.{}.mlp.experts"),
        ("granite4_h", "model.layers.{}.block_sparse_moe.experts"),
        ("nemotron3", "backbone.layers.{}.mixer.experts"),
    ],
)
def test_adapters_of_a_tensor_of_all_experts_are_of_a_parameter(tmp_path, family, module):
    """PEFT's `ParamWrapper` multiplies A `[E r, in]` and B `[out, r E]` so, and has `down_proj` outermost."""
    mesh, adapters, base, dropped = exported(tmp_path, family)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    files = load_file(tmp_path / "peft/adapter_model.safetensors")
    with jax.set_mesh(mesh):
        after, before = (jax.device_get(model) for model in (merged(adapters, base), base))
    gated, pattern, num = after.cfg.is_gated, after.cfg.pattern, after.cfg.experts.num
    names = [f"{module.split('.')[-2]}.experts.{'gate_' * gated}up_proj"]
    assert config["target_parameters"] == [
        *names,
        names[0].replace("gate_up", "up").replace("up", "down"),
    ]
    assert config["rank_pattern"].get("gate_up_proj") == (8 if gated else None)

    def change(layer, inner):
        number = half_numbers(pattern)[layer][-1] if pattern else layer
        stem = f"{PREFIX}{module.format(number)}{inner}"
        a, b = (files.pop(f"{stem}.lora_{x}.weight") for x in "AB")
        a, b = a.reshape(num, -1, a.shape[1]), b.reshape(len(b), -1, num)
        return 6 / 4 * np.einsum("ore,eri->eio", b, a)

    for layers, *stacks in zip(after.cfg.stacks, after.stacks, before.stacks, strict=True):
        blocks = zip(*map(layers_of, stacks), strict=True)
        for (depth, pair), (row, first) in itertools.product(enumerate(blocks), enumerate(layers)):
            if not hasattr(pair[0], "moe"):
                continue
            up, down = change(first + depth, ".base_layer"), change(first + depth, "")
            found = {"w_up": up, "w_down": down}
            if family == "gpt_oss":
                found |= {"w_gate": up[..., 0::2], "w_up": up[..., 1::2]}
            elif gated:
                found |= dict(zip(("w_gate", "w_up"), np.split(up, 2, axis=-1), strict=True))
            for name, values in found.items():
                new, old = (getattr(block.moe, name).get_value()[row] for block in pair)
                np.testing.assert_allclose(values, new - old, rtol=1e-4, atol=1e-5)
    assert not dropped and not [name for name in files if ".experts." in name]
