"""Train a language model in a loop of your own, on any mesh: `python own_training_loop.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import contextlib
import dataclasses

import jax

import ultrascale_jax as us

CFG = us.Config(
    model=us.ModelConfig(
        vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=us.DataConfig(source="python-stdlib", seq_len=64),
    optim=us.OptimConfig(lr=1e-2, warmup_steps=2),
    train=us.TrainConfig(steps=10, global_batch=8, precision="fp32"),
)


def losses(sizes: us.MeshConfig) -> list[float]:
    """Return the loss of each step on a mesh of these sizes."""
    cfg = dataclasses.replace(CFG, mesh=sizes).check(len(jax.devices()))
    mesh = us.make_mesh(cfg.mesh)
    # Not us.Loader alone: where cp splits the sequence, attention needs the tokens in another order.
    loader = us.make_loader(cfg)
    by_step = []
    with jax.set_mesh(mesh), contextlib.closing(loader.device_batches(mesh, 0)) as batches:
        state: us.TrainState = us.init_state(cfg, mesh)
        step = us.make_train_step(cfg)
        for _ in range(cfg.train.steps):
            number, batch, _ = next(batches)
            state, metrics = step(state, batch)
            by_step.append(float(metrics["loss"]))
            print(f"step {number + 1}  loss {by_step[-1]:.4f}")
    return by_step


def main() -> list[float]:
    return losses(us.MeshConfig(fsdp=2, cp=2, tp=2))


if __name__ == "__main__":
    main()
