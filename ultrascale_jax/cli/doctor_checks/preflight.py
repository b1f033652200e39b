"""Three real steps of a tiny model on the job's own mesh, with a checkpoint at the end."""

import contextlib
import dataclasses
import io
import math
import time
from pathlib import Path

import jax

from ultrascale_jax.cli.doctor_checks.disk import PREFLIGHT
from ultrascale_jax.cli.doctor_checks.findings import Finding
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Experts,
    LogConfig,
    ModelConfig,
    UserError,
)
from ultrascale_jax.launch.multihost import gather
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.training.loop import train

STEPS = 3


def tiny(cfg: Config, run_dir: Path) -> Config:
    """Return a small model that the mesh of `cfg` can divide, with the same parallelisms, precision and optimizer."""
    mesh, run = cfg.mesh, cfg.train
    heads = mesh.tensor * mesh.cp
    model = ModelConfig(
        vocab_size=128 * mesh.tensor * mesh.pp,
        d_model=math.lcm(128, mesh.tensor, mesh.fsdp * mesh.cp * mesh.ep),
        d_ff=128 * mesh.tensor,
        num_layers=max(2, mesh.pp * cfg.pp.stages_per_rank),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=16,
        experts=Experts(num=2 * mesh.ep) if mesh.ep > 1 else None,
    )
    return dataclasses.replace(
        cfg,
        model=model,
        data=DataConfig(source="synthetic", seq_len=128 * mesh.cp * mesh.sp),
        train=dataclasses.replace(
            run,
            steps=STEPS,
            batch_ramp="",
            global_batch=mesh.batch * run.microbatches,
            eval_every=0,
            eval_batches=1,
        ),
        checkpoint=CheckpointConfig(every=0, resume="never"),
        log=LogConfig(run_dir=str(run_dir)),
    )


def checks(cfg: Config) -> list[Finding]:
    """Train, and say how long it took and what it could not do."""
    folder = Path(cfg.log.run_dir) / f"{PREFLIGHT}{gather(time.time_ns())[0]}"
    begun = time.monotonic()
    try:
        small = tiny(cfg, folder).check(jax.device_count())
    except UserError as error:
        text = f"no tiny model fits this mesh: {error}"
        return [Finding("NOTE", "preflight", text, "The recipe itself is checked by the run")]
    try:
        mesh = small.mesh
        with contextlib.redirect_stdout(io.StringIO()):
            summary = train(small, make_mesh(mesh))
    except Exception as error:  # Whatever it is, it would have ended the run.
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return [Finding("FAIL", "preflight", text)]
    finally:
        gather(None)
    took, loss = time.monotonic() - begun, summary["loss"]
    text = f"{STEPS} steps of a tiny model on {mesh.text} and a checkpoint in {took:.0f} s, loss {loss:.2f}"
    return [Finding("OK", "preflight", text)]
