"""Train a model: `ultrascale train [RECIPE] [--mesh fsdp=4,tp=2] [--section.field VALUE ...]`."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ultrascale_jax.checkpoint.init_from import check_run_dir
from ultrascale_jax.cli import command_line, devices, generate, init_from, output, trace_tables
from ultrascale_jax.cli.store_logits import store
from ultrascale_jax.config import Config, require
from ultrascale_jax.config.section import Count
from ultrascale_jax.launch import watchdog
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.processes import follow_supervisor
from ultrascale_jax.launch.run_files import METRICS
from ultrascale_jax.launch.sigterm import SignalListener

STORED_PROBABILITIES = 64
"""Probabilities of each target that `--store-logits` keeps by default."""

WORTH_READING = 200
"""Steps before which a model of the size of `demo` writes no words."""

SAMPLE_TOKENS = 300
"""Tokens of the text that a model of `python-stdlib` writes at the end."""


@dataclass(frozen=True, kw_only=True)
class Options(command_line.JobOptions):
    """Options of `ultrascale train`, without the configuration's."""

    profile: Annotated[str | None, command_line.option("FIRST:LAST")] = None
    """Write a `jax.profiler` trace of these steps into the run directory, as 10:13, and end with a report of it."""
    store_logits: Annotated[Path | None, command_line.option("DIR")] = None
    """Train nothing: store in DIR the largest probabilities of train.distill.teacher for the rows of this run, in at
    most 8 K + 4 bytes a token; after a kill the same command continues."""
    top_k: Annotated[Count | None, command_line.option("K", f"{STORED_PROBABILITIES}")] = None
    """Probabilities of each target that --store-logits keeps."""

    def __post_init__(self):
        super().__post_init__()
        fix = "counts only with --store-logits DIR"
        require(self.store_logits is not None or self.top_k is None, "top_k", self.top_k, fix)
        fix = "write the first step and the one to stop before, as 10:13"
        steps = self.profile_steps
        require(self.profile is None or steps is not None, "profile", self.profile, fix)
        require(steps is None or steps[0] < steps[1], "profile", self.profile, fix)
        fix = "fake devices are one process's; leave out --dist.address and its like"
        alone = (self.dist.address, self.dist.num_processes, self.dist.process_id) == (None,) * 3
        require(self.fake_devices is None or alone, "fake_devices", self.fake_devices, fix)

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """`profile` as two numbers."""
        match = re.fullmatch(r"(\d+):(\d+)", self.profile or "")
        return (int(match[1]), int(match[2])) if match else None


DESCRIPTION = f"""Train a language model. RECIPE is one of {", ".join(command_line.recipes())} \
(default {command_line.DEFAULT_RECIPE}), or a file ./my.py or module pkg.mod that exposes `config`; \
the options change single fields of it."""


def main(argv: Sequence[str]) -> None:
    follow_supervisor(os.environ)
    watchdog.limit("start")
    # From here on: a signal that comes before the first step stops the run before it.
    with SignalListener():
        cfg, options = command_line.parse(
            argv, prog="ultrascale train", options=Options, description=DESCRIPTION
        )
        if options.store_logits is not None:
            with command_line.user_errors():
                store(cfg, options, options.store_logits, options.top_k or STORED_PROBABILITIES)
            return
        summary = run(cfg, options)
    import jax

    if jax.process_index() == 0:
        say(f"{cfg.log.run_dir} is at step {summary['step']} of {cfg.train.steps}")
        if options.profile_steps is not None:
            report_profile(cfg.log.run_dir)
    if summary["stopped"] or cfg.train.steps < WORTH_READING:
        return
    if jax.process_count() == 1 and cfg.data.source == "python-stdlib":
        write_sample(cfg, summary["step"])
    if jax.process_index() == 0:
        say(look_back(cfg.log.run_dir))


def write_sample(cfg: Config, step: int, number: int = SAMPLE_TOKENS) -> None:
    """Print a text of `number` tokens that the run's model writes after `step` steps, and record it as an event."""
    say("a sample:\n")
    options = generate.Options(model=cfg.log.run_dir, prompt="def ", num_tokens=number)
    with command_line.user_errors():
        [text] = generate.texts(options)
    say(text)
    events = Events(Path(cfg.log.run_dir), 0)
    events.record("sample", step=step, prompt=options.prompt, text=text)


def report_profile(run_dir: str) -> None:
    """Print where the traced steps spent their time; a trace that cannot be read is one line."""
    from ultrascale_jax.plan.profile.report import make_report

    try:
        output.console(120).print(trace_tables.tables(make_report(Path(run_dir))))
    except Exception as error:  # The run itself is done and well.
        say(f"profile: no report: {' '.join(str(error).split())}")


def look_back(run_dir: str) -> str:
    """Return the loss of a run as a chart of characters, and commands to try next."""
    from ultrascale_jax.figures.text import line_chart
    from ultrascale_jax.training.metrics import read_rows

    rows = read_rows(Path(run_dir) / METRICS)
    points = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    steps, losses = zip(*points, strict=True) if points else ((), ())
    commands = {
        f"watch {run_dir}": "every metric on a page of the browser",
        f'generate {run_dir} --prompt "def "': "more of what it writes",
        "plan guide llama3_70b --gpus 512": "the same on a cluster, in three steps",
    }
    width = max(map(len, commands))
    lines = [f"  ultrascale {name:<{width}}  {words}" for name, words in commands.items()]
    return "\n".join(["", "loss by step", line_chart(steps, losses), "", "next:", *lines])


def run(cfg: Config, options: Options) -> dict:
    """Join the other processes and train; see `training.loop.train`."""
    # JAX is imported only now: `--help` should be quick, and XLA reads its flags once.
    import jax

    from ultrascale_jax.cli import kernel_check
    from ultrascale_jax.launch import distributed
    from ultrascale_jax.sharding.mesh import make_mesh
    from ultrascale_jax.training.compilation_cache import keep_programs
    from ultrascale_jax.training.loop import train

    with command_line.user_errors(patience_s=command_line.PATIENCE_S):
        check_run_dir(cfg)
    launch = options.join()
    rank = 0 if launch is None else launch.process_id
    events = Events(Path(cfg.log.run_dir), rank)
    with command_line.user_errors(), distributed.guarded(events.record):
        kernel_check.check_run(cfg, options, launch, say, events)
        job = distributed.describe_job(launch)
        if jax.process_index() == 0:
            say(job)
        keep_programs(say)
        distributed.check_devices(launch, options.dist)
        cfg = devices.on_devices(cfg, options, say)
        if not init_from.bring_back(cfg) and cfg.train.init_from:
            init_from.bring_tokenizer(cfg)
        mesh = make_mesh(cfg.mesh)
        return train(cfg, mesh, profile=options.profile_steps)
