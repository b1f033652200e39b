"""Evaluate a trained model: `ultrascale evaluate MODEL [--source NAME=text:GLOB ...] [--tasks TASK,...]`.

MODEL is a run directory or a Hugging Face folder. Each source gives loss, perplexity and bits per byte, every token
counted once. Tasks are from lm-evaluation-harness, or your own in its format.
"""

import contextlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.table import Table

from ultrascale_jax.checkpoint.copies import run_on_disk
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.models import Opened, ScoreOptions, described, loaded, on_mesh
from ultrascale_jax.config import Config, require
from ultrascale_jax.config.section import Count, Natural
from ultrascale_jax.units import precise

BOOTSTRAPS = 1000
"""Samples for the standard error of a task's metric that has no formula for it."""


@dataclass(frozen=True, kw_only=True)
class Options(ScoreOptions):
    """Options of `ultrascale evaluate`."""

    source: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]SOURCE")]
    ] = ()
    """Held-out text: text:GLOB, tokens:DIR or python-stdlib; repeat it, with names, for perplexity by domain."""
    tasks: Annotated[str, command_line.option("TASK,...")] = ""
    """Tasks of lm-evaluation-harness."""
    include_path: Annotated[str | None, command_line.option("DIR")] = None
    """Folder of tasks of your own, in YAML; a task's Python code runs."""
    limit: Annotated[Count | None, command_line.option("N", "all")] = None
    """Take so many documents of each task."""
    num_fewshot: Annotated[Natural | None, command_line.option("N", "the task's")] = None
    """Solved examples before each question of a task."""
    chat: command_line.Flag = False
    """Put the prompts of tasks into the tokenizer's chat template."""
    json: command_line.Flag = False
    """Print one JSON object instead of tables."""

    def __post_init__(self):
        super().__post_init__()
        has_input = bool(self.source or self.tasks)
        fix = "name text by --source, or --tasks TASK"
        require(has_input, "source", self.source, fix)
        for name in ("include_path", "limit", "num_fewshot", "chat"):
            value = getattr(self, name)
            require(bool(self.tasks) or not value, name, value, "is for tasks; add --tasks TASK")


def named(words: Sequence[str], option: str) -> dict[str, str]:
    """Split each `NAME=VALUE` of `words`; a value without a name is its own. Raises `UserError` for a name twice."""
    values: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"([\w.-]+)=(.+)", word)
        name, value = (match[1], match[2]) if match else (word, word)
        require(name not in values, option, word, f"there are two of {name!r}; name each: NAME=...")
        values[name] = value
    return values


def source_result(nats: float, tokens: int, text_bytes: int | None) -> dict[str, Any]:
    """Return loss, perplexity and bits per byte (None if unknown) of these sums."""
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    bits = nats / math.log(2) / text_bytes if text_bytes else None
    return {"tokens": tokens, "loss": loss, "perplexity": perplexity, "bits_per_byte": bits}


def task_manager(options: Options, cfg: Config) -> Any:
    """Return the harness's index of tasks. Raises `UserError` for a task that it does not have, and for a pipeline."""
    from ultrascale_jax.cli.lm_eval_model import TaskManager, check_mesh

    check_mesh(cfg)
    folder, names = options.include_path, set(options.tasks.split(","))
    fix = "there is no such folder"
    require(folder is None or Path(folder).is_dir(), "include_path", folder, fix)
    if folder is not None:
        folder_manager = TaskManager(include_path=folder, include_defaults=False)
        if names <= set(folder_manager.all_tasks):
            return folder_manager  # the harness's own tasks are 14,000 files, which take seconds
    manager = TaskManager(include_path=folder)
    unknown = ", ".join(sorted(names - set(manager.all_tasks)))
    fix = f"lm-evaluation-harness has no {unknown}; give the folder of your own tasks by --include-path"
    require(not unknown, "tasks", options.tasks, fix)
    return manager


def tasks_result(options: Options, manager: Any, opened: Opened) -> dict[str, dict[str, Any]]:
    """Return the numbers of each task, and group of tasks, by the harness's names."""
    from ultrascale_jax.cli.lm_eval_model import LMEvalModel, simple_evaluate

    with contextlib.redirect_stdout(sys.stderr):
        results = simple_evaluate(
            model=LMEvalModel(opened),
            tasks=options.tasks.split(","),
            task_manager=manager,
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.chat,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    assert results is not None
    return {
        name: {key: value for key, value in row.items() if isinstance(value, int | float)}
        for name, row in results["results"].items()
    }


@dataclass(frozen=True)
class Evaluation:
    """Results by the names of sources and tasks."""

    model: str
    sources: dict[str, dict[str, Any]]
    """Loss, perplexity and bits per byte; of all together under `all`, if they are several."""
    tasks: dict[str, dict[str, Any]]
    """The harness's numbers by its own names."""

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> Group:
        return Group(*self._tables())

    def _tables(self) -> Iterator[Table]:
        if self.sources:
            columns = list(next(iter(self.sources.values())))
            table = output.table(["sources"], [name.replace("_", " ") for name in columns])
            for name, values in self.sources.items():
                table.add_row(output.plain(name), *(precise(values[key]) for key in columns))
            yield table
        if self.tasks:
            table = output.table(["task"], ["metric", "value", "standard error"])
            for name, values in self.tasks.items():
                for metric, value in values.items():
                    key, _, chosen = metric.partition(",")
                    if not key.endswith("_stderr"):
                        error = values.get(f"{key}_stderr,{chosen}")
                        table.add_row(output.plain(name), metric, precise(value), precise(error))
            yield table


def evaluate(options: Options) -> Evaluation:
    """Return the results of every source and task."""
    import jax

    from ultrascale_jax.data.tokenizer import run_tokenizer
    from ultrascale_jax.training.scoring import Scorer, source_rows

    named_model = options.model
    options = replace(options, model=run_on_disk(named_model, options.step))
    cfg, positions = described(options)
    cfg, mesh = on_mesh(options, cfg, positions)
    tokenizer = run_tokenizer(cfg.data)
    # All input is checked before a large model is loaded.
    sources = {
        name: source_rows(cfg, source) for name, source in named(options.source, "source").items()
    }
    manager = task_manager(options, cfg) if options.tasks else None
    with output.working(f"loading {named_model}") as tell, jax.set_mesh(mesh):
        cfg, params = loaded(options, cfg, mesh)
        tell("computing losses")
        scorer = Scorer(cfg, params, tokenizer)
        sums = {name: scorer.loss(rows) for name, rows in sources.items()}
    for name, source_sums in sums.items():
        require(source_sums.tokens > 0, "source", name, "has no token to predict; give more text")
    held_out = {name: source_result(*source_sums) for name, source_sums in sums.items()}
    if len(sums) > 1:
        nats, tokens, sizes = zip(*sums.values(), strict=True)
        text_bytes = None if None in sizes else sum(sizes)
        held_out["all"] = source_result(sum(nats), sum(tokens), text_bytes)
    tasks = {}
    if manager is not None:
        opened = Opened(Path(options.model), cfg, mesh, positions, tokenizer, params)
        tasks = tasks_result(options, manager, opened)
    return Evaluation(named_model, held_out, tasks)


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale evaluate"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        results = evaluate(options)
    output.show("evaluate", results, as_json=options.json)
