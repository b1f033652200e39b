"""Draw one plan in many variants: `python -m scripts.studies CHART WORDS --panels P ... --x X ... --out FILE.png`.

    memory   a GPU's memory in stacks, one for each X, at one sequence a micro-batch; a panel for each P
    time     the time of a step in stacks, in the same way
    lines    memory, throughput and exposed communication over the Xs; a line for each P
    map      the throughput of each P (a row) and X (a column), with the run

WORDS are arguments of `ultrascale plan memory`, in which `{panel}` stands for each P and `{x}` for each X. So a value
that they leave open is chosen for each variant, as the fastest that fits: the micro-batch, recomputation, and with
`--mesh auto` the mesh. A variant that is not legal is left out.
"""

import argparse
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from docs.drawings.charts import Cell, Heat, Lines
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import UserError
from ultrascale_jax.figures.charts import Bar, Bars, Point
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import limit, wrap
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

CELL_WIDTH = 17
"""Characters of a line in a cell of the heat map."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Variants of a plan."""

    words: Sequence[str]
    panels: Sequence[str]
    xs: Sequence[str]

    @property
    def x(self) -> str:
        """The options that vary along x."""
        pairs = itertools.pairwise(("", *self.words))
        return " and ".join(option.lstrip("-") for option, value in pairs if "{x}" in value)

    def title(self, panel: str) -> str:
        """Return a P with the option that it is the value of."""
        option = dict(zip(self.words[1:], self.words, strict=False)).get("{panel}", "")
        return f"{option.lstrip('-')} {panel}" if option.startswith("--") else panel

    @property
    def caption(self) -> str:
        return f"By the planner's formulas, of: ultrascale plan memory {' '.join(self.words)}"

    def run(self, panel: str, x: str) -> tuple[Run, Cluster]:
        """Return a variant with its open values chosen. `UserError` if there is no such run."""
        words = [word.replace("{panel}", panel).replace("{x}", x) for word in self.words]
        cfg, options, cluster = common.parse(words, "memory", common.Options, __doc__)
        with warnings.catch_warnings():
            # Tensor groups larger than a node warn; the study shows that they are slow.
            warnings.simplefilter("ignore")
            cfg = common.choose_open(cfg, options, cluster)
            return Run.of(cfg, cluster.num_gpus), cluster

    def steps(self, *, one_sequence: bool = False) -> dict[str, dict[str, StepPrediction]]:
        """Predict the variants by panel and x, as they are or with micro-batches of one sequence."""
        predictions: dict[str, dict[str, StepPrediction]] = {panel: {} for panel in self.panels}
        why = None
        for panel, x in itertools.product(self.panels, self.xs):
            try:
                run, cluster = self.run(panel, x)
            except UserError as error:
                why = error
                continue
            if one_sequence:
                rows = run.sequences * run.microbatches
                run = dataclasses.replace(run, sequences=1, microbatches=rows)
            predictions[panel][x] = estimate(run, cluster)
        if why and not any(predictions.values()):
            raise why
        return {self.title(panel): steps for panel, steps in predictions.items() if steps}


def memory(study: Study) -> Figure:
    """Stack the memory of one GPU."""
    steps = study.steps(one_sequence=True)
    panels = {
        panel: [
            Bar(
                label=x,
                parts={n: size / GIB for n, size in breakdown(step.run).parts.items()},
            )
            for x, step in by_x.items()
        ]
        for panel, by_x in steps.items()
    }
    gpu = next(iter(next(iter(steps.values())).values())).gpu
    return Bars(
        name="memory",
        title="Memory of one GPU at one sequence a micro-batch",
        caption=study.caption,
        panels=panels,
        unit="GiB",
        x=study.x,
        **limit(gpu),
    )


def time(study: Study) -> Figure:
    """Stack the time of a step."""
    panels = {
        panel: [
            Bar(label=x if step.may_fit else f"{x}*", parts=dict(step.parts))
            for x, step in by_x.items()
        ]
        for panel, by_x in study.steps().items()
    }
    return Bars(
        name="time",
        title="Where the time of a step goes (a star: does not fit)",
        caption=study.caption,
        panels=panels,
        unit="seconds a step",
        x=study.x,
    )


def lines(study: Study) -> Figure:
    """Draw memory, throughput and exposed communication."""
    panels: dict[str, dict[str, list[Point]]] = {
        "memory of one GPU (GiB)": {},
        "throughput (tokens/s/GPU)": {},
        "exposed communication (% of a step)": {},
    }
    for panel, by_x in study.steps().items():
        for x, step in by_x.items():
            exposed_s = sum(s for name, s in step.parts.items() if name.startswith("exposed"))
            values = step.peak_bytes / GIB, step.tokens_per_s_gpu, 100 * exposed_s / step.step_s
            for by_line, y in zip(panels.values(), values, strict=True):
                point = Point(x=int(x), y=y, solid=step.may_fit)
                by_line.setdefault(panel, []).append(point)
    return Lines(
        name="lines",
        title="Memory, throughput and communication",
        caption=study.caption,
        panels=panels,
        x=study.x,
        y="",
        hollow="does not fit",
        scale="none",
    )


def heat(study: Study) -> Figure:
    """Draw throughput as a map."""
    cells = {
        (panel, x): Cell(value=step.tokens_per_s_gpu, text=_text(step))
        for panel, by_x in study.steps().items()
        for x, step in by_x.items()
        if step.may_fit
    }
    return Heat(
        name="map",
        title="Throughput of the fastest run",
        caption=study.caption,
        rows=tuple(map(study.title, study.panels)),
        columns=tuple(study.xs),
        cells=cells,
        unit="tokens/s/GPU",
        x=study.x,
        absent="none fits",
    )


def _text(step: StepPrediction) -> str:
    run = step.run
    axes = [f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1]
    zero = f"zero{run.zero} " if run.zero else ""
    remat = str(run.remat).replace(",", ", ").replace("+", " +")
    batch = f"{zero}mbs{run.sequences} x{run.microbatches}"
    texts = (" ".join(axes), batch, remat, f"{step.peak_bytes / GIB:.1f} GiB")
    return "\n".join(wrap(text, CELL_WIDTH) for text in texts)


CHARTS = {"memory": memory, "time": time, "lines": lines, "map": heat}


def main(argv: Sequence[str]) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m scripts.studies", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("chart", choices=CHARTS)
    parser.add_argument("--panels", nargs="+", required=True, metavar="P")
    parser.add_argument("--x", nargs="+", required=True, metavar="X")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    options, words = parser.parse_known_args(argv)
    with command_line.user_errors():
        study = Study(words=words, panels=options.panels, xs=options.x)
        print(output.write_figure(CHARTS[options.chart](study), options.out))


if __name__ == "__main__":
    main(sys.argv[1:])
