"""Every pipeline schedule trains as one device does: losses of four steps and all gradients, in float32, to 1e-5."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ultrascale_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.sharding import act
from ultrascale_jax.training.state import canonical, init_state, layer_order
from ultrascale_jax.training.step import count, loss_and_gradients, make_eval_step, train_step

STEPS, MICROBATCHES, TOLERANCE = 4, 8, 1e-5

BASE = Config(
    model=ModelConfig(
        vocab_size=64, d_model=16, d_ff=32, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=16),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(steps=STEPS, global_batch=16, precision="fp32", z_loss=1e-3),
)
LLAMA: dict = {}
OLMO2 = {"qk_norm": "full", "norm_placement": "post", "qkv_bias": True, "tied_embeddings": True}
QWEN3 = {"qk_norm": "head", "sliding_window": 7}
UNEVEN = {"num_layers": 7}

FSDP_SP = {"pp": 2, "fsdp": 2, "sp": 2}
FSDP_CP = {"pp": 2, "fsdp": 2, "cp": 2}
# name: (mesh, section pp, fields of train, fields of model)
TABLE = {
    "afab_sp": ({"pp": 4, "sp": 2}, {"schedule": "afab"}, {}, LLAMA),
    "afab_fsdp_cp_full": (FSDP_CP, {"schedule": "afab"}, {"remat": "full"}, QWEN3),
    "1f1b_fsdp_sp": (FSDP_SP, {}, {"zero": 3}, OLMO2),
    "1f1b_fsdp_full_zero2": ({"pp": 4, "fsdp": 2}, {}, {"zero": 2, "remat": "full"}, UNEVEN),
    "1f1b_fsdp_cp_input": (FSDP_CP, {"stash": "input"}, {"zero": 1}, LLAMA),
    "1f1b_dp_tp_selective": ({"pp": 2, "dp": 2, "tp": 2}, {}, {"remat": "selective"}, OLMO2),
    "1f1b_ep_tp": ({"pp": 2, "ep": 2, "tp": 2}, {}, {"zero": 3, "remat": "dots"}, QWEN3),
    "1f1b_sp_tp_more_than_kv_heads": ({"pp": 2, "sp": 2, "tp": 2}, {}, {}, QWEN3),
    "1f1b_pp8": ({"pp": 8}, {}, {"remat": "full"}, LLAMA),
    "interleaved_fsdp_sp_dots": (FSDP_SP, {"schedule": "interleaved"}, {"remat": "dots"}, QWEN3),
    "interleaved_cp_v2": ({"pp": 4, "cp": 2}, {"schedule": "interleaved"}, {"remat": "full"}, OLMO2),
    "interleaved_fsdp_tp_v4": (
        {"pp": 2, "fsdp": 2, "tp": 2}, {"schedule": "interleaved", "virtual": 4, "group": 4}, {}, LLAMA,
    ),
    "zb_uniform_fsdp_sp": (FSDP_SP, {"schedule": "zb_uniform", "virtual": 2}, {"zero": 2}, UNEVEN),
    "zb_uniform_cp_full": ({"pp": 4, "cp": 2}, {"schedule": "zb_uniform"}, {"remat": "full"}, QWEN3),
    "zb_h1_fsdp_cp": (FSDP_CP, {"schedule": "zb_h1"}, {"remat": "full"}, LLAMA),
    "zb_h1_sp": ({"pp": 4, "sp": 2}, {"schedule": "zb_h1"}, {}, OLMO2),
    "zb_v_fsdp_sp": (FSDP_SP, {"schedule": "zb_v"}, {"remat": "selective"}, QWEN3),
    "zb_v_cp": ({"pp": 4, "cp": 2}, {"schedule": "zb_v"}, {}, LLAMA),
    "dualpipe_v_fsdp_cp": (FSDP_CP, {"schedule": "dualpipe_v"}, {}, OLMO2),
    "dualpipe_v_sp_input": (
        {"pp": 4, "sp": 2}, {"schedule": "dualpipe_v", "stash": "input"}, {}, UNEVEN | {"num_layers": 11},
    ),
    "zb_h1_divergent": ({"pp": 4, "sp": 2}, {"schedule": "zb_h1", "divergent": True}, {}, LLAMA),
    "zb_v_divergent": (FSDP_SP, {"schedule": "zb_v", "divergent": True}, {"remat": "full"}, LLAMA),
}  # fmt: skip

# What `make test-fast` runs of it.
FAST = {"1f1b_fsdp_sp", "zb_uniform_fsdp_sp"}


def configure(mesh, pp, train, model) -> Config:
    num_devices = int(np.prod(list(mesh.values()), dtype=int))
    train = {"microbatches": MICROBATCHES if "pp" in mesh else 1} | train
    cfg = dataclasses.replace(
        BASE,
        model=dataclasses.replace(BASE.model, **model),
        mesh=MeshConfig(**{"fsdp": 1, **mesh}),
        pp=PipelineConfig(**pp),
        train=dataclasses.replace(BASE.train, **train),
    )
    return cfg.check(num_devices)


def run(cfg: Config):
    """Losses of four steps, gradients of the first by name in canonical order, and the evaluation at the end."""
    loader = Loader(cfg.data, vocab_size=cfg.model.vocab_size, global_batch=16, seed=0)
    sizes = cfg.mesh.sizes.values()
    mesh = make_mesh(cfg.mesh, jax.devices()[: int(np.prod(list(sizes), dtype=int))])

    @jax.jit
    def step(state, batch):
        weight = 1.0 / count(batch).astype(np.float32)
        grads = loss_and_gradients(cfg, state.params, batch, weight)[1]
        return train_step(cfg, state, batch), grads

    losses, first = [], {}
    with jax.set_mesh(mesh):
        state = init_state(cfg, mesh)
        sharding = NamedSharding(mesh, act("BT"))
        for i in range(STEPS):
            batch = jax.device_put(loader.batch(i), sharding)
            (state, metrics), grads = step(state, batch)
            losses.append(float(metrics["loss"]))
            if i == 0:
                leaves = jax.tree_util.tree_leaves_with_path(canonical(grads, layer_order(cfg)))
                first = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        nats, tokens = make_eval_step(cfg)(state.params, batch)
    return losses, first, float(nats) / int(tokens)


@pytest.fixture(scope="module")
def one_device():
    """One device, no accumulation, no sharding: what every pipeline must equal. Made once for each model."""
    known = {}

    def get(model):
        key = tuple(sorted(model.items()))
        if key not in known:
            known[key] = run(configure({}, {}, {"zero": 0}, model))
        return known[key]

    return get


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TABLE]
)
def test_pipeline_gives_the_losses_and_gradients_of_one_device(name, one_device):
    mesh, pp, train, model = TABLE[name]
    losses, grads, evaluation = run(configure(mesh, pp, train, model))
    expected_losses, expected_grads, expected_evaluation = one_device(model)
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    np.testing.assert_allclose(evaluation, expected_evaluation, rtol=TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for path, expected in expected_grads.items():
        error = np.abs(grads[path] - expected).max() / np.abs(expected).max()
        assert error < TOLERANCE, f"{path}: relative error {error:.1e}"
