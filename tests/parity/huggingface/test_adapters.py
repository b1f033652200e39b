"""Adapters of every projection, experts' too, leave as PEFT names them and merged; neither export loses a tensor."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf_layout import load, stored
from tests.paths import HF
from ultrascale_jax.config import Config, MeshConfig, TrainConfig, UserError
from ultrascale_jax.config.lora import Lora, projections
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.adapters import PREFIX, save_adapters
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.models.lora import merged
from ultrascale_jax.models.partition import combine
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


def configured(family: str) -> Config:
    model = read_config(HF / family)
    lora = Lora(rank=4, alpha=6.0, targets=projections(model))
    train = TrainConfig(precision="fp32", lora=lora, init_from="hf:x")
    return Config(model=model, mesh=MeshConfig.of(ep=2, tp=2), train=train).check(4)


def random(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(0, 0.1, x.shape).astype(x.dtype), x.sharding), tree
    )


def exported(tmp_path: Path, family: str):
    """Export random adapters both ways; return the mesh, the adapters and the base."""
    cfg = configured(family)
    mesh = make_mesh(cfg.mesh, jax.devices()[:4])
    state = abstract_state(cfg, mesh)
    adapters, base = random(state.params), checkpoint.load(HF / family, state.frozen)
    with jax.set_mesh(mesh):
        save_adapters(adapters, cfg.model, cfg.train.lora, tmp_path / "peft", base="x")
        checkpoint.save(merged(adapters, base), cfg.model, tmp_path / "full", dtype="float32")
    return mesh, adapters, base


@pytest.mark.parametrize("family", MODULES)
def test_both_exports_have_each_adapter(tmp_path, family):
    exported(tmp_path, family)
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


def test_a_merged_export_has_the_logits_of_its_adapters(tmp_path):
    """Gradients of adapters of every model are those of merged weights (tests/parity/train_step/test_lora.py)."""
    mesh, adapters, base = exported(tmp_path, "qwen3_next")
    ids = np.arange(48, dtype=np.int32).reshape(4, 12)
    places = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)

    def logits(model):
        return jax.jit(lambda model: model.logits(ids, places))(model)

    with jax.set_mesh(mesh):
        apart = logits(combine(adapters, base))
    reloaded = load(tmp_path / "full", "fsdp=2")
    with jax.set_mesh(jax.tree.leaves(reloaded)[0].sharding.mesh):
        whole = logits(reloaded)
    np.testing.assert_allclose(apart, whole, rtol=1e-5, atol=1e-5 * np.abs(whole).max())


def test_experts_of_one_tensor_are_exported_merged(tmp_path):
    cfg = configured("gpt_oss")
    mesh = make_mesh(cfg.mesh, jax.devices()[:4])
    adapters = random(abstract_state(cfg, mesh).params)
    with (
        jax.set_mesh(mesh),
        pytest.raises(UserError, match=r"'experts\.gate_proj': lies in .*; merge"),
    ):
        save_adapters(adapters, cfg.model, cfg.train.lora, tmp_path / "peft", base="x")
