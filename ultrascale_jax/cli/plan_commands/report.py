"""Draw figures as PNG files and one HTML page: `ultrascale plan report`.

`report FILE...` draws the output of other verbs: JSON of memory, compile and search, or CSV of measured runs.
`report RECIPE ...` computes everything by formulas. A page needs no network and holds no date.
"""

import dataclasses
import platform
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale_jax import __version__
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import parse_choices, recipe_of
from ultrascale_jax.config import UserError, require
from ultrascale_jax.figures import page
from ultrascale_jax.figures.figure import Figure, version
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.report import files, plans
from ultrascale_jax.units import GIB

PROG = "ultrascale plan report"


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of `ultrascale plan report FILE...`."""

    files: tyro.conf.Positional[tuple[str, ...]]
    """JSON of a verb or CSV of runs."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "out/report"
    """Directory for report.html and the PNG files; for one --figure also a FILE.png."""
    figure: Annotated[str | None, command_line.option("NAME", "all, and report.html")] = None
    """Draw this figure alone, as memory_over_step of what `plan compile --dump` wrote."""
    json: command_line.Flag = False
    """Print the list of files as one JSON object."""

    def __post_init__(self):
        _check_out(self)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(common.Assumptions):
    """Options of `ultrascale plan report RECIPE`."""

    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "out/report"
    """Directory for report.html and the PNG files; for one --figure also a FILE.png."""
    figure: Annotated[str | None, command_line.option("NAME", "all, and report.html")] = None
    """Draw this figure alone: memory, memory_sequence, memory_zero, memory_axis, memory_tensor, microbatches,
    step_parts, scaling, communication, cheat_sheet, bubble or best."""
    models: Annotated[str | None, command_line.option("RECIPE,...", "the recipe alone")] = None
    """Rows of the heat map of the fastest configurations."""
    max_nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 64
    """Largest column of that heat map."""
    fixed: Annotated[str | None, command_line.option("FIELD=VALUE,...")] = None
    """Pin choices of its searches, as schedule=1f1b, which makes them several times faster."""

    def __post_init__(self):
        super().__post_init__()
        command_line.require_at_least(1, self, "max_nodes")
        fix = f"choose one of {', '.join(plans.NAMES)}"
        require(self.figure in (None, *plans.NAMES), "figure", self.figure, fix)
        _check_out(self)


def _check_out(options: FileOptions | RecipeOptions) -> None:
    one_file = options.figure is None and Path(options.out).suffix == ".png"
    require(not one_file, "out", options.out, "name a directory, or one --figure for the file")


def main(argv: list[str]) -> None:
    if any(_is_file(word) for word in _positional(argv)):
        _of_files(argv)
    else:
        _of_recipe(argv)


def _positional(argv: list[str]) -> list[str]:
    """Return the words that are neither options nor values of options."""
    before = ["", *argv]
    return [
        word
        for word, last in zip(argv, before, strict=False)
        if not word.startswith("-")
        and (last == "--json" or "=" in last or not last.startswith("--"))
    ]


def _is_file(word: str) -> bool:
    """Return whether the word names a file rather than a recipe."""
    path = Path(word)
    return path.is_file() or "/" in word or path.suffix in (".json", ".csv", ".txt", ".html")


def _of_files(argv: list[str]) -> None:
    with command_line.user_errors():
        options = command_line.read(FileOptions, argv, prog=PROG, description=__doc__ or "")
        sources = [files.read(path) for path in options.files]
        found = files.figures(sources)
        if options.figure is not None:
            by_name = {figure.name: figure for figure in found}
            fix = f"choose one of {', '.join(by_name)}"
            require(options.figure in by_name, "figure", options.figure, fix)
            return _write_one(by_name[options.figure], Path(options.out), options.json)
        around = page.Page(
            title="Report of runs and plans",
            subtitle=", ".join(f"{source.verb}: {Path(source.path).name}" for source in sources),
            facts={},
            command=_command(argv),
            inputs=[f"{s.path} (SHA-256 {s.digest}...)" for s in sources],
            versions=_versions(),
        )
        _write(lambda tell: found, around, options.out, options.json)


def _of_recipe(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "report", RecipeOptions, __doc__)
    recipe = recipe_of(argv)
    with command_line.user_errors():
        cfg, why = common.choose_open(cfg, options, cluster)
        common.tell(why)
        run = common.planned(cfg, options)
        choices = {} if options.fixed is None else parse_choices("fixed", options.fixed)
        scenario = plans.Scenario(
            name=recipe, cfg=cfg, cluster=cluster, shape=run.shape, choices=choices
        )
        models = [scenario]
        if options.models is not None:
            rest = argv[1:] if argv[:1] == [recipe] else argv
            models = [_model(scenario, name.strip(), rest) for name in options.models.split(",")]
        if options.figure is not None:
            with output.working(f"computing {options.figure}") as tell:
                names = [options.figure]
                figure = next(plans.figures(scenario, models, options.max_nodes, tell, names=names))
            return _write_one(figure, Path(options.out), options.json)
        step = estimate(run, cluster)
        held = f"{step.peak_bytes / GIB:.1f} of {cluster.gpu.usable_bytes / GIB:.1f} GiB"
        around = page.Page(
            title=f"{recipe} on {options.gpus} {cluster.gpu.name}",
            subtitle=f"By the planner's formulas: {run.label}, sequences of {run.seq_len:,} tokens",
            facts={
                "parameters": f"{run.shape.num_params / 1e9:.2f} B",
                "tokens a step": f"{run.step_tokens:,}",
                "peak memory of one GPU": held,
                "step": f"{step.step_s:.2f} s",
                "tokens/s/GPU": f"{step.tokens_per_s_gpu:,.0f}",
                "MFU": f"{100 * step.mfu:.1f}%",
            },
            command=_command(argv),
            inputs=[
                f"recipe {name}" for name in dict.fromkeys(s.name for s in (scenario, *models))
            ],
            versions=_versions(),
        )

        def make(tell: output.Tell) -> Iterable[Figure]:
            return plans.figures(scenario, models, options.max_nodes, tell)

        _write(make, around, options.out, options.json)


def _model(scenario: plans.Scenario, recipe: str, arguments: list[str]) -> plans.Scenario:
    """Return the scenario of another recipe with the same options."""
    cfg, options, cluster = common.parse([recipe, *arguments], "report", RecipeOptions, "")
    cfg, why = common.choose_open(cfg, options, cluster)
    common.tell(why)
    shape = common.shape_of(cfg, options)
    return dataclasses.replace(scenario, name=recipe, cfg=cfg, shape=shape)


def _write(
    make: Callable[[output.Tell], Iterable[Figure]], around: page.Page, out: str, as_json: bool
) -> None:
    """Draw the figures one after the other; an interrupt keeps the finished ones, on a page of their own."""
    require(out != "", "out", out, "name a directory")
    folder = Path(out)
    drawn: list[tuple[Figure, str]] = []
    stopped = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with output.working("computing") as tell:
                for figure in make(tell):
                    tell(f"drawing {figure.name}")
                    drawn.append((figure, figure.draw(folder / f"{figure.name}.png")))
                    tell("computing the next figure")
        except KeyboardInterrupt:
            stopped = True
        (folder / "report.html").write_text(page.render(around, drawn), encoding="utf-8")
    except OSError as error:
        raise UserError(f"out={out!r}: cannot be written: {error.strerror}") from None
    written = [str(folder / f"{f.name}.png") for f, _ in drawn] + [str(folder / "report.html")]
    _tell_files(written, as_json, complete=not stopped)
    if stopped:
        raise SystemExit(130)


def _write_one(figure: Figure, out: Path, as_json: bool) -> None:
    """Draw one figure, as the file `out` or in the directory `out`."""
    path = out if out.suffix == ".png" else out / f"{figure.name}.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(path)
    except OSError as error:
        raise UserError(f"out={str(out)!r}: cannot be written: {error.strerror}") from None
    _tell_files([str(path)], as_json)


def _tell_files(written: list[str], as_json: bool, *, complete: bool = True) -> None:
    if as_json:
        print(output.verb_json("report", {"files": written, "complete": complete}))
    else:
        print("\n".join(written))


def _command(argv: list[str]) -> str:
    return f"{PROG} {shlex.join(argv)}"


def _versions() -> str:
    python = platform.python_version()
    return f"ultrascale_jax {__version__}, Python {python}, matplotlib {version()}"
