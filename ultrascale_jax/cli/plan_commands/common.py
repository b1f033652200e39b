"""Options that all verbs of `ultrascale plan` share, and the `Run` that they describe."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import FP8, Config, require
from ultrascale_jax.config.section import Section, between
from ultrascale_jax.kernels.choices import is_blackwell
from ultrascale_jax.launch.events import say
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.hardware import GPUS, Cluster, find_cluster
from ultrascale_jax.plan.search.search_space import named_choices
from ultrascale_jax.units import whole_number

MOST_GPUS = 2**20
MOST_TOKENS = 2**36
MOST_SEQ_LEN = 2**27
"""Far more than anyone has trained with; a number beyond is a slip, on which a search would go on for ever."""


@dataclass(frozen=True, kw_only=True)
class Answer(Section):
    """Options of a verb that answers by tables, JSON or a figure."""

    json: command_line.Flag = False
    """Print one JSON object instead of tables."""
    figure: Annotated[Path | None, command_line.option("FILE.png")] = None
    """Draw the answer."""

    def __post_init__(self):
        super().__post_init__()
        is_picture = self.figure is None or self.figure.suffix == ".png"
        require(is_picture, "figure", str(self.figure), "must end in .png")


@dataclass(frozen=True, kw_only=True)
class Options(Answer, command_line.Options):
    """Options that name the machine to plan for, and the step by its tokens."""

    gpus: Annotated[int, between(1, MOST_GPUS), tyro.conf.arg(metavar="N")] = 8
    """Number of GPUs."""
    gpu: Annotated[str | None, command_line.option("NAME", "the cluster's, or h100")] = None
    """Name of the GPU; FILE or NAME:FILE, a GpuTargetConfig of a real host; or GIB,GBS,TFLOPS[/FP8_TFLOPS][,WATTS], a
    GPU by its memory, the bandwidth of that, dense peaks and power, with its links by --cluster."""
    cluster: Annotated[str | None, command_line.option("NAME|NODESxGPUS,INTRA,INTER")] = None
    """The machine's name, or its nodes and the GB/s of one GPU within and between them; then ,HOST_GIB,HOST_GBS may
    follow, the memory of a host and the GB/s of one GPU to it."""
    global_batch_tokens: Annotated[str | None, command_line.option("4Mi", "the recipe's")] = None
    """Tokens of one optimizer step, instead of --train.global-batch; 4Mi is 4 * 1,024 * 1,024, 4M is 4,000,000."""

    # A plan runs on no devices.
    fake_devices: tyro.conf.Suppress[int | None] = None

    def __post_init__(self):
        super().__post_init__()
        require(self.gpu != "", "gpu", self.gpu, f"choose one of {', '.join(GPUS)}")


def parse[O: Options](
    argv: Sequence[str], verb: str, options: type[O], description: str | None
) -> tuple[Config, O, Cluster]:
    """Return the recipe with the step that the options give, the options, and the machine."""
    cfg, chosen = command_line.parse(
        argv, prog=f"ultrascale plan {verb}", options=options, description=description or ""
    )
    with command_line.user_errors():
        cfg, cluster = described(cfg, chosen)
        return cfg, chosen, cluster


def described(cfg: Config, options: Options) -> tuple[Config, Cluster]:
    """Return `cfg` with the step that the options give, and the machine.

    Raises `UserError` for a step larger than anyone's, a machine that is not known, or one without such a precision.
    """
    if options.global_batch_tokens is not None:
        fix = "--global-batch-tokens gives the batch too; leave out one of them"
        for field in ("batch_ramp", "global_batch"):
            named = f"train.{field}" in options.named
            require(not named, f"train.{field}", getattr(cfg.train, field), fix)
        count = tokens("global_batch_tokens", options.global_batch_tokens)
        fix = f"must be at least one sequence of data.seq_len={cfg.data.seq_len}"
        sequences = count // cfg.data.seq_len
        require(sequences >= 1, "global_batch_tokens", options.global_batch_tokens, fix)
        train = dataclasses.replace(cfg.train, global_batch=sequences, batch_ramp=())
        cfg = dataclasses.replace(cfg, train=train)
    sequences, seq_len = cfg.train.global_batch, cfg.data.seq_len
    require(seq_len <= MOST_SEQ_LEN, "data.seq_len", seq_len, f"must be at most {MOST_SEQ_LEN:,}")
    fix = (
        f"so many sequences of {seq_len:,} tokens are more than {MOST_TOKENS:,}, the most of a step"
    )
    require(sequences * seq_len <= MOST_TOKENS, "train.global_batch", sequences, fix)
    cluster = find_cluster(options.cluster, options.gpu, options.gpus)
    if cfg.train.precision in FP8:
        cluster.gpu.peak_flops("fp8")
    is_able = cfg.train.precision != "mxfp8" or is_blackwell(cluster.gpu.kind)
    fix = f"needs Blackwell GPUs, and these are {cluster.gpu.name}; use --gpu b200, or fp8"
    require(is_able, "train.precision", cfg.train.precision, fix)
    return cfg, cluster


def choose_open(cfg: Config, options: Options, cluster: Cluster) -> Config:
    """Return `cfg` with its `auto` fields chosen for `cluster`; stderr gets the choices and their reasons.

    Where nothing fits, the choice is the one that needs the least memory. Call it inside `user_errors`.
    """
    choose_mesh = options.mesh == "auto"
    with output.working("choosing what the command line leaves open"):
        fixed = named_choices(cfg, options.named, options.gpus)
        cfg, why = choose_auto(cfg, cluster, choose_mesh=choose_mesh, fixed=fixed, must_fit=False)
    if why:
        say(why, sys.stderr)
    return cfg


def tokens(name: str, text: str) -> int:
    """Return the number of tokens that the option `name` gives. Raises `UserError` for anything else."""
    try:
        count = whole_number(text)
    except ValueError:
        count = 0
    fix = "write a number of tokens, as 300B, 4M (4,000,000) or 4Mi (4 * 1,024 * 1,024)"
    require(count >= 1, name, text, fix)
    return count
