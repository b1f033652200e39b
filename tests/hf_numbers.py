"""Logits, loss, gradients and AdamW steps of each family on a mesh, and what `transformers` computed of them.

`expected.npz` beside each checkpoint was written by transformers 5.23 with torch 2.13 on a CPU, in float32 with eager
attention, or by 5.24 and `tests/data/make_hf.py`. DeepSeek-V3's module of multi-token prediction, which `transformers`
leaves out, is its `DeepseekV3DecoderLayer` between the parts of arXiv 2412.19437, section 2.2, in float64; gradients
and steps are of both losses.
"""

import collections
import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tests.paths import HF
from ultrascale_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    MoEConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config, read_model_type
from ultrascale_jax.huggingface.families import FAMILIES
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.optim import optimizer
from ultrascale_jax.train_step.state import TrainState, abstract_state
from ultrascale_jax.train_step.step import gradients, make_train_step

GRANITE = {
    ".mlp.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".mlp.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".mlp.router.layer": ".block_sparse_moe.router",
}
FUSED = {"(gate_proj|up_proj|w1|w3)": "gate_up_proj", "(down_proj|w2)": "down_proj"}


def run(family, mesh, **model):
    """Config, with these fields of its model, mesh, parameters, batch and expected numbers of one fixture."""
    folder = HF / family
    with np.load(folder / "expected.npz", allow_pickle=False) as file:
        expected = dict(file)
    sizes = MeshConfig.parse(mesh)
    num_devices = int(np.prod(list(sizes.sizes.values())))
    tokens = expected["tokens"]
    cfg = Config(
        model=dataclasses.replace(read_config(folder), **model),
        mesh=sizes,
        data=DataConfig(seq_len=tokens.shape[1], document_mask=False),
        optim=OptimConfig(
            lr=1e-3, schedule="constant", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1
        ),
        # Rows of parity compare the other lowering with this one.
        train=TrainConfig(global_batch=len(tokens), precision="fp32", lowering="plain"),
        moe=MoEConfig(bias_rate=0.0),
    ).check(num_devices)
    mesh = make_mesh(cfg.mesh, jax.devices()[:num_devices])
    params = checkpoint.load(folder, abstract_state(cfg, mesh).params)
    targets = np.full_like(tokens, -1)
    targets[:, :-1] = tokens[:, 1:]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "targets": targets, "positions": positions}
    place = NamedSharding(mesh, act("BT"))
    batch = {name: jax.device_put(value, place) for name, value in batch.items()}
    return cfg, mesh, params, batch, expected


def norms_by_name(grads, model, family):
    """L2 norm of each gradient, by the name of the parameter in `transformers`.

    There a layer's experts are one parameter, and gate and up as well; the router's bias and a layer's scalar have no
    gradient.
    """
    squares = collections.defaultdict(float)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        if name.endswith("moe.bias"):
            continue
        tensor, values = checkpoint.tensors(model, family)[name], np.asarray(leaf, np.float64)
        if tensor.name.endswith("layer_scalar"):
            assert not values.any()
            continue
        alone = tensor.stack is None
        layers, values = ([None], [values]) if alone else (model.stacks[tensor.stack], values)
        for layer, value in zip(layers, values, strict=True):
            full = tensor.names(layer)[0].replace("block_sparse_moe", "mlp")
            full = full.replace("experts.0.", "experts.E.") if tensor.experts else full
            full = full.replace("backbone.", "model.")
            for pattern, whole in FUSED.items():
                whole = "up_proj" if ".mixer." in full and "up" in whole else whole  # has no gate
                full = re.sub(rf"experts\.E\.{pattern}\.weight", f"experts.{whole}", full)
            for stored, whole in GRANITE.items():
                full = full.replace(stored, whole)
            squares[full] += np.sum(np.square(value))
    return {name: square**0.5 for name, square in squares.items()}


def forward(cfg, mesh, params, batch, with_logits=True):
    """Logits, if wanted, loss, gradients, and nats and counts of modules that predict ahead."""

    @jax.jit
    def passes(params, batch):
        logits = params.logits(batch["tokens"], batch["positions"]) if with_logits else None
        weight = 1.0 / jnp.sum((batch["targets"] >= 0).astype(jnp.float32))
        grads, sums = gradients(cfg, params, batch, weight)
        return logits, sums.loss, grads, sums.mtp

    with jax.set_mesh(mesh):
        return passes(params, batch)


def steps(cfg, mesh, params, batch):
    """Yield the parameters and the metrics of each AdamW step on one batch, without end."""

    @jax.jit
    def fresh(params):
        zeros = (jnp.int32(0) for _ in range(3))
        return TrainState(params, optimizer(cfg).init(params), *zeros, None)

    with jax.set_mesh(mesh):
        state, train_step = fresh(params), make_train_step(cfg)
    while True:
        with jax.set_mesh(mesh):
            state, metrics = train_step(state, batch)
        yield state.params, metrics


def check_logits(family: str, mesh: str) -> None:
    """Compare logits alone."""
    _, mesh, params, batch, expected = run(family, mesh)
    with jax.set_mesh(mesh):
        logits_of = jax.jit(
            lambda params, batch: params.logits(batch["tokens"], batch["positions"])
        )
        logits = logits_of(params, batch)
    np.testing.assert_allclose(np.asarray(logits), expected["logits"], rtol=0, atol=1e-4)


def check_gradients(family: str, mesh: str, with_logits: bool = True) -> None:
    """Compare logits, if wanted, loss and the norm of each gradient."""
    cfg, mesh, params, batch, expected = run(family, mesh)
    logits, loss, grads, ahead = forward(cfg, mesh, params, batch, with_logits)
    if with_logits:
        np.testing.assert_allclose(np.asarray(logits), expected["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(float(loss), expected["loss"], rtol=0, atol=1e-4)
    if ahead is not None:
        nats, counts = (np.asarray(part) for part in ahead)
        share = (batch["targets"].size - len(batch["targets"])) / counts
        np.testing.assert_allclose(nats * share, expected["mtp_loss"], rtol=1e-5)
    norms = norms_by_name(grads, cfg.model, FAMILIES[read_model_type(HF / family)])
    assert sorted(norms) == sorted(expected["grad_names"])
    for name, norm in zip(expected["grad_names"], expected["grad_norms"], strict=True):
        np.testing.assert_allclose(norms[name], norm, rtol=1e-4, err_msg=name)


def check_steps(family: str, mesh: str) -> None:
    """Compare the losses of four AdamW steps."""
    cfg, mesh, params, batch, expected = run(family, mesh)
    losses, ahead = [], []
    for _, metrics in itertools.islice(steps(cfg, mesh, params, batch), len(expected["losses"])):
        losses.append(float(metrics["loss"]))
        ahead += list(metrics.get("mtp_loss", ()))
    # They agree to 1e-6; with half of the weight decay they differ by 5e-5.
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=3e-6)
    np.testing.assert_allclose(ahead, expected.get("mtp_losses", []), rtol=0, atol=3e-6)
