"""Store a teacher's largest probabilities for the data of a run: `ultrascale train RECIPE --store-logits DIR`."""

from pathlib import Path

from ultrascale_jax.cli import command_line, devices, init_from, output
from ultrascale_jax.config import Config, require
from ultrascale_jax.config.distill import STORED, TEACHER
from ultrascale_jax.launch.events import say


def store(cfg: Config, options: command_line.Options, folder: Path, top_k: int) -> None:
    """Write the folder, on any mesh of one process, and print the option of a run that reads it."""
    distill = cfg.train.distill
    fix = "must name a model that runs: hf:DIR or RUN_DIR"
    require(distill.enabled and not distill.stored, TEACHER, distill.teacher, fix)
    fix = f"the model has {cfg.model.vocab_size} tokens; use at most so many"
    require(top_k <= cfg.model.vocab_size, "top_k", top_k, fix)
    if options.fake_devices is not None:
        command_line.use_fake_devices(options.fake_devices)
    # JAX is imported only now: `--help` should be quick.
    from ultrascale_jax.sharding.mesh import make_mesh
    from ultrascale_jax.training.store_logits import store_logits

    cfg = devices.on_devices(cfg, options, say)
    if cfg.train.init_from:
        init_from.bring_tokenizer(cfg)
    with (
        output.working(f"loading {distill.teacher}") as tell,
        output.writing("store_logits", folder),
    ):
        index = store_logits(cfg, make_mesh(cfg.mesh), folder, top_k, tell)
    words = f"{index.top_k} probabilities of each target of {index.rows:,} rows"
    print(f"{folder}: {words}, {index.record.itemsize} bytes a target")
    print(f"--{TEACHER} {STORED}{folder}")
