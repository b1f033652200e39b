"""Every mesh trains as one device does: the losses of four steps and all gradients, in float32, to 1e-5."""

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
    TrainConfig,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.sharding import act
from ultrascale_jax.training.state import init_state
from ultrascale_jax.training.step import count, loss_and_gradients, train_step

STEPS = 4
TOLERANCE = 1e-5

BASE = Config(
    model=ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=32),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(steps=STEPS, global_batch=16, microbatches=2, precision="fp32", z_loss=1e-3),
)
FAMILIES = {
    "llama": {},
    "olmo2_tied": {
        "qk_norm": "full",
        "norm_placement": "post",
        "qkv_bias": True,
        "tied_embeddings": True,
    },
    "qwen3_window": {
        "qk_norm": "head",
        "num_kv_heads": 2,
        "sliding_window": 7,
        "first_window_layer": 1,
    },
}
# (mesh, other fields of train, family)
TABLE = {
    "dp8": ({"dp": 8}, {}, "llama"),
    "fsdp8_zero0": ({"fsdp": 8}, {"zero": 0}, "llama"),
    "fsdp8_zero1": ({"fsdp": 8}, {"zero": 1}, "llama"),
    "fsdp8_zero2": ({"fsdp": 8}, {"zero": 2}, "llama"),
    "fsdp8_zero3": ({"fsdp": 8}, {"zero": 3}, "llama"),
    "fsdp8_one_micro_batch": ({"fsdp": 8}, {"microbatches": 1}, "llama"),
    "tp2": ({"tp": 2}, {}, "llama"),
    "sp4": ({"sp": 4}, {}, "llama"),
    "dp2_fsdp2_sp2": ({"dp": 2, "fsdp": 2, "sp": 2}, {}, "llama"),
    "fsdp2_sp2_tp2": ({"fsdp": 2, "sp": 2, "tp": 2}, {}, "llama"),
    "dp2_fsdp2_tp2_zero2": ({"dp": 2, "fsdp": 2, "tp": 2}, {"zero": 2}, "llama"),
    "dp2_fsdp2_sp2_zero1": ({"dp": 2, "fsdp": 2, "sp": 2}, {"zero": 1}, "olmo2_tied"),
    "fsdp2_ep2_cp2": ({"fsdp": 2, "ep": 2, "cp": 2}, {}, "llama"),
    "sp4_tp2_more_ranks_than_kv_heads": ({"sp": 4, "tp": 2}, {}, "qwen3_window"),
    "dp2_fsdp2_sp2_olmo2": ({"dp": 2, "fsdp": 2, "sp": 2}, {"remat": "full"}, "olmo2_tied"),
    "fsdp2_sp2_tp2_qwen3": ({"fsdp": 2, "sp": 2, "tp": 2}, {"remat": "selective"}, "qwen3_window"),
}

# What `make test-fast` runs of it: every axis, gathering once a step and layer by layer.
FAST = {"fsdp2_sp2_tp2_qwen3", "dp2_fsdp2_sp2_zero1"}


def run(mesh: dict[str, int], family: str, **train) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of four steps, and the gradients of the first."""
    cfg = dataclasses.replace(
        BASE,
        model=dataclasses.replace(BASE.model, **FAMILIES[family]),
        mesh=MeshConfig(**{"fsdp": 1, **mesh}),
        train=dataclasses.replace(BASE.train, **train),
    )
    num_devices = int(np.prod(list(mesh.values()), dtype=int))
    cfg = cfg.check(num_devices)
    loader = Loader(cfg.data, vocab_size=cfg.model.vocab_size, global_batch=16, seed=0)
    device_mesh = make_mesh(cfg.mesh, jax.devices()[:num_devices])

    @jax.jit
    def step(state, batch):
        weight = 1.0 / count(batch).astype(np.float32)
        return train_step(cfg, state, batch), loss_and_gradients(cfg, state.params, batch, weight)[
            1
        ]

    losses, first = [], {}
    with jax.set_mesh(device_mesh):
        state = init_state(cfg, device_mesh)
        sharding = NamedSharding(device_mesh, act("BT"))
        for i in range(STEPS):
            batch = jax.device_put(loader.batch(i), sharding)
            (state, metrics), grads = step(state, batch)
            losses.append(float(metrics["loss"]))
            if i == 0:
                leaves = jax.tree_util.tree_leaves_with_path(grads)
                first = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return losses, first


@pytest.fixture(scope="module")
def one_device():
    """One device, no accumulation, no sharding: what every mesh must equal. Made once for each family."""
    known = {}

    def get(family):
        if family not in known:
            known[family] = run({}, family, microbatches=1, zero=0)
        return known[family]

    return get


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TABLE]
)
def test_mesh_gives_the_losses_and_gradients_of_one_device(name, one_device):
    mesh, train, family = TABLE[name]
    losses, grads = run(mesh, family, **train)
    expected_losses, expected_grads = one_device(family)
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for path, expected in expected_grads.items():
        error = np.abs(grads[path] - expected).max() / np.abs(expected).max()
        assert error < TOLERANCE, f"{path}: relative error {error:.1e}"
