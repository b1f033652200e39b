"""Plan a run without its GPUs: `ultrascale plan VERB ...`; `VERB --help` says more.

memory    predict the memory of one GPU, part by part, by formula  [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
guide     explain the way to a configuration, days and cost        [RECIPE] --gpus 64 --tokens 1T
mesh      show which GPUs share what, and over which link      [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
roofline  show what limits each operation of a layer           [RECIPE] --gpus 8
compile   compile the step: memory, collectives, predicted time    [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
search    find the fastest mesh, micro-batch and recomputation     [RECIPE] --gpus 64 --global-batch-tokens 4Mi
schedule  show pipeline schedules: tables, figures, animations     [NAME] --ranks 4 --microbatches 8
sweep     measure a grid of runs here, or predict it, as CSV       [RECIPE] --gpus 8
serve     plan on a page of the browser, interactively             [RECIPE] --gpus 64
report    draw figures of any of these, as PNG and one HTML file   FILE... or RECIPE --gpus 64
"""

import importlib
from collections.abc import Callable, Mapping, Sequence

from ultrascale_jax.cli import command_line
from ultrascale_jax.config import require

VERBS = (
    *("memory", "guide", "mesh", "roofline", "compile", "search", "schedule", "sweep"),
    *("serve", "report"),
)


def main(
    argv: Sequence[str], more: Mapping[str, Callable[[list[str]], None]] | None = None
) -> None:
    """Run the verb that the first word names; `more` has main functions of other verbs, or ones that replace ours."""
    arguments, more = list(argv), more or {}
    others = [verb for verb in more if verb not in VERBS]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__, *(f"In this checkout also: {verb}" for verb in others))
        return
    verb = arguments.pop(0) if arguments else ""
    if verb in more:
        more[verb](arguments)
        return
    with command_line.user_errors():
        fix = "is no part of the product; in a checkout: python -m scripts.plan validate RUNS.csv"
        require(verb != "validate", "verb", verb, fix)
        require(verb in VERBS, "verb", verb, f"choose one of {', '.join([*VERBS, *others])}")
    importlib.import_module(f"ultrascale_jax.cli.plan_commands.{verb}").main(arguments)
