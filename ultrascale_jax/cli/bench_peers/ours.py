"""A recipe of this project, trained by the same command line, loader, state and step as `ultrascale train` uses."""

import os
import time

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    Unavailable,
    moment,
    pipelined,
    resident_bytes,
    serve,
)


def make(spec: dict) -> Contestant:
    cfg, _ = command_line.parse(spec["arguments"], prog="bench")
    # As in `ultrascale train`, JAX comes after the command line, and XLA's flags before JAX.
    import jax

    from ultrascale_jax.launch import distributed
    from ultrascale_jax.sharding.mesh import make_mesh
    from ultrascale_jax.train_step.state import init_state
    from ultrascale_jax.train_step.step import make_train_step
    from ultrascale_jax.training.setup import make_loader

    distributed.set_environment(os.environ)
    if spec["needs_gpu"] and jax.default_backend() != "gpu":
        raise Unavailable(f"JAX sees no GPU, only {jax.default_backend()}")
    cfg = cfg.check(jax.device_count())
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

    def peak_bytes() -> int:
        statistics = jax.local_devices()[0].memory_stats() or {}
        return statistics.get("peak_bytes_in_use") or resident_bytes()

    loss, first_step = float(advance(batch)), moment()
    return Contestant(
        run=lambda n: pipelined(lambda: advance(next(batches)[1]), jax.block_until_ready, n),
        peak_bytes=peak_bytes,
        compile_s=compile_s,
        loss=loss,
        first_step=first_step,
        device=jax.devices()[0].device_kind,
        libraries=("jax", "jaxlib", "flax", "optax", "numpy"),
        notes={"remat": cfg.train.remat, "precision": cfg.train.precision},
    )


if __name__ == "__main__":
    serve(make)
