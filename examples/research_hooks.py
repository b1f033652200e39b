"""Train with terms, an optimizer and frozen parameters of your own, on any mesh: `python research_hooks.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import contextlib
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

import ultrascale_jax as us


class MeasuredMLP(us.MLP):
    """The built-in MLP, which also reports the mean size of its results."""

    def __call__(self, x_BRD):
        y_BRD = super().__call__(x_BRD)
        return y_BRD, {"mlp_size": jnp.mean(jnp.abs(y_BRD.astype(jnp.float32)))}


class SmallStates(us.Transformer):
    """A model that keeps the results of MLPs and the last states small too; Lion trains all but the embedding."""

    layers = us.Layers(mlp=MeasuredMLP)
    layer_terms: ClassVar = {"mlp_size": 0.1}  # times 0.1 in the objective; 0 would only log it
    loss_terms = ("state_size",)  # logged with the loss

    def loss(self, x_BRD, targets_BT, weight, **settings):
        objective, bare = super().loss(x_BRD, targets_BT, weight, **settings)
        x_BTD = us.gather_sequence(x_BRD, "V")
        size = weight * jnp.sum(jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1))
        size = us.all_reduce(size, "V", "mean")  # all ranks of the vocabulary computed the same
        return objective + 0.01 * size, bare, {"state_size": size}

    @staticmethod
    def make_optimizer(cfg):
        return optax.lion(us.lr_schedule(cfg), weight_decay=0.1)

    @staticmethod
    def is_trained(path):
        return path != "embed"


TERMS = ("loss", "state_size", "mlp_size")
CFG = us.Config(
    model=us.ModelConfig(
        vocab_size=256, d_model=32, d_ff=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=us.DataConfig(source="python-stdlib", seq_len=64),
    optim=us.OptimConfig(lr=1e-3),
    train=us.TrainConfig(steps=4, global_batch=8, microbatches=2, precision="fp32"),
)


def train(sizes: us.MeshConfig, devices: list[jax.Device]):
    """Return loss and terms of each step on a mesh, and the states after layer 2 of the last batch."""
    cfg = dataclasses.replace(CFG, mesh=sizes).check(len(devices))
    mesh = us.make_mesh(cfg.mesh, devices)
    rows = []
    with (
        jax.set_mesh(mesh),
        contextlib.closing(us.make_loader(cfg).device_batches(mesh, 0)) as batches,
    ):
        state, step = us.init_state(cfg, mesh, SmallStates), us.make_train_step(cfg)
        for _ in range(cfg.train.steps):
            _, batch, _ = next(batches)
            state, metrics = step(state, batch)
            rows.append([float(metrics[name]) for name in TERMS])
        model = us.gather_stages(state.params)  # of a pipeline all layers on each rank
        documents = batch["positions"], batch.get("segment_ids")
        inputs = us.LayerInputs.of(cfg.model, *documents, context=cfg.cp)
        run = jax.jit(lambda model, tokens: model(tokens, inputs, capture=(2,)).captured[2])
        states = jax.device_get(run(model, batch["tokens"]))
    return rows, states[:, us.sequence_order(64, cfg.mesh.cp, cfg.cp).argsort()]


def main():
    one = train(us.MeshConfig(fsdp=1), jax.devices()[:1])
    many = train(us.MeshConfig(fsdp=4, tp=2), jax.devices())
    for number, (a, b) in enumerate(zip(one[0], many[0], strict=True), start=1):
        pairs = (f"{name} {x:.6f} {y:.6f}" for name, x, y in zip(TERMS, a, b, strict=True))
        print(f"step {number}:", ", ".join(pairs))
    return one, many


if __name__ == "__main__":
    main()
