"""A recipe of this project, trained by the same command line, loader, state and step as `ultrascale train` uses."""

import sys
import time

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    device_bytes,
    pipelined,
    require_gpu,
    serve,
)


def make(spec: dict) -> Contestant:
    cfg, options = command_line.parse(spec["arguments"], prog="bench")
    # As in `ultrascale train`, JAX comes after the command line, and XLA's flags before JAX.
    import jax

    from ultrascale_jax.sharding.mesh import make_mesh
    from ultrascale_jax.train_step.state import init_state
    from ultrascale_jax.train_step.step import make_train_step
    from ultrascale_jax.training.setup import make_loader

    require_gpu(spec)
    cfg = command_line.on_devices(cfg, options, lambda why: print(why, file=sys.stderr))
    mesh = make_mesh(cfg.mesh)
    jax.set_mesh(mesh)
    state = init_state(cfg, mesh)
    batches = make_loader(cfg).device_batches(mesh, 0)
    _, batch, _ = next(batches)
    begun = time.perf_counter()
    step = make_train_step(cfg).lower(state, batch).compile()
    compile_s = time.perf_counter() - begun

    def advance(batch: dict) -> jax.Array:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    loss = float(advance(batch))
    return Contestant(
        run=lambda n: pipelined(lambda: advance(next(batches)[1]), jax.block_until_ready, n),
        peak_bytes=device_bytes,
        compile_s=compile_s,
        loss=loss,
        device=jax.devices()[0].device_kind,
        libraries=("jax", "jaxlib", "flax", "optax", "numpy"),
        notes={"remat": cfg.train.remat, "precision": cfg.train.precision},
    )


if __name__ == "__main__":
    serve(make)
