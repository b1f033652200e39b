"""Store a teacher's largest probabilities for the data of a run: `ultrascale store-logits [RECIPE] --out DIR`.

The options are those of the run, with `--train.distill.teacher hf:DIR` or a run, on any mesh of one process. The run
itself then has `--train.distill.teacher topk:DIR`, on any mesh, and the teacher's memory and time no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ultrascale_jax.cli import command_line, devices, init_from, output
from ultrascale_jax.config import Config, put_home, require
from ultrascale_jax.config.distill import STORED, TEACHER
from ultrascale_jax.config.section import Count
from ultrascale_jax.launch.events import say


@dataclass(frozen=True, kw_only=True)
class Options(command_line.Options):
    """Options of `ultrascale store-logits`, without the configuration's."""

    out: Path = Path("out/topk")
    """Folder for the probabilities, of at most 8 K + 4 bytes a token; after a kill the same command goes on."""
    top_k: Count = 64
    """Probabilities of each target (K)."""

    def __post_init__(self):
        put_home(self, "out")
        super().__post_init__()


def main(argv: Sequence[str]) -> None:
    prog = "ultrascale store-logits"
    cfg, options = command_line.parse(argv, prog=prog, options=Options, description=__doc__ or "")
    with command_line.user_errors():
        store(cfg, options)


def store(cfg: Config, options: Options) -> None:
    """Write the folder that the options name, and print the options of a run that reads it."""
    distill = cfg.train.distill
    fix = "must name a model that runs: hf:DIR or RUN_DIR"
    require(distill.enabled and not distill.stored, TEACHER, distill.teacher, fix)
    fix = f"the model has {cfg.model.vocab_size} tokens; use at most so many"
    require(options.top_k <= cfg.model.vocab_size, "top_k", options.top_k, fix)
    if options.fake_devices is not None:
        command_line.use_fake_devices(options.fake_devices)
    # JAX is imported only now: `--help` should be quick.
    from ultrascale_jax.sharding.mesh import make_mesh
    from ultrascale_jax.training.store_logits import store_logits

    cfg = devices.on_devices(cfg, options, say)
    if cfg.train.init_from:
        init_from.bring_tokenizer(cfg)
    with output.working(f"loading {distill.teacher}") as tell, output.writing("out", options.out):
        index = store_logits(cfg, make_mesh(cfg.mesh), options.out, options.top_k, tell)
    words = f"{index.top_k} probabilities of each target of {index.rows:,} rows"
    print(f"{options.out}: {words}, {index.record.itemsize} bytes a target")
    print(f"--{TEACHER} {STORED}{options.out}")
