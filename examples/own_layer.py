"""Train a model with an MLP and a norm of your own on any mesh, pipelines too: `python own_layer.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import ultrascale_jax as us


class SquaredReLU(nnx.Module):
    """Compute max(x w_up, 0)^2 w_down (arXiv 2109.08668): two matrices, not three."""

    def __init__(self, cfg: us.ModelConfig, key: jax.Array):
        k_up, k_down = jax.random.split(key)
        D, F = cfg.d_model, cfg.d_ff
        self.w_up = us.param(k_up, "DF", "BTD", (D, F))  # its dims, its activation's dims, sizes
        self.w_down = us.param(k_down, "FD", "BTF", (F, D))

    def __call__(self, x_BRD: jax.Array) -> jax.Array:
        x_BTD = us.gather_sequence(x_BRD)  # over sp
        up_BTF = us.linear("BTD,DF->BTF", x_BTD, self.w_up[...])
        h_BTF = jnp.square(jax.nn.relu(up_BTF))
        return us.linear("BTF,FD->BTD", h_BTF, self.w_down[...], to="BRD")  # summed over sp and tp


class LayerNorm(nnx.Module):
    """Compute (x - mean) / std * scale, in float32."""

    def __init__(self, cfg: us.ModelConfig):
        self.scale = us.param(None, "D", "BRD", (cfg.d_model,), std=1)  # ones

    def __call__(self, x_BRD: jax.Array) -> jax.Array:
        centred = x_BRD.astype(jnp.float32)
        centred = centred - us.mean(centred, "D", "BRD")
        normed = centred * jax.lax.rsqrt(us.mean(jnp.square(centred), "D", "BRD") + 1e-5)
        scale = us.broadcast_param(self.scale[...], "D", "BRD", x_BRD.shape)
        return (normed * scale).astype(x_BRD.dtype)


class MyModel(us.Transformer):
    layers = us.Layers(mlp=SquaredReLU, norm=LayerNorm)


CFG = us.Config(
    model=us.ModelConfig(
        vocab_size=256, d_model=32, d_ff=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=us.DataConfig(source="python-stdlib", seq_len=64),
    optim=us.OptimConfig(lr=1e-2),
    train=us.TrainConfig(steps=5, global_batch=8, microbatches=2, precision="fp32"),
)


def losses(sizes: us.MeshConfig, devices: list[jax.Device]) -> list[float]:
    """Return the loss of each step on a mesh; `us.train(cfg, mesh, model=MyModel)` has checkpoints and all else too."""
    cfg = dataclasses.replace(CFG, mesh=sizes).check(len(devices))
    mesh = us.make_mesh(cfg.mesh, devices)
    loader = us.make_loader(cfg)
    rows = []
    with jax.set_mesh(mesh), contextlib.closing(loader.device_batches(mesh, 0)) as batches:
        state, step = us.init_state(cfg, mesh, MyModel), us.make_train_step(cfg)
        for _ in range(cfg.train.steps):
            _, batch, _ = next(batches)
            state, metrics = step(state, batch)
            rows.append(float(metrics["loss"]))
    return rows


def main():
    one = losses(us.MeshConfig(fsdp=1), jax.devices()[:1])
    many = losses(us.MeshConfig(pp=2, fsdp=2, tp=2), jax.devices())
    for number, (a, b) in enumerate(zip(one, many, strict=True), start=1):
        print(f"step {number}  one device {a:.6f}  pp=2,fsdp=2,tp=2 {b:.6f}")
    return one, many


if __name__ == "__main__":
    main()
