"""Plan a run without its GPUs: `ultrascale plan VERB ...`; `VERB --help` says more.

memory    predict the memory of one GPU, part by part, by formula  [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
search    find the fastest mesh, micro-batch and recomputation     [RECIPE] --gpus 64 --global-batch-tokens 4Mi
schedule  show pipeline schedules: tables and figures              [NAME] --ranks 4 --microbatches 8
guide     explain the way to a configuration, days and cost        [RECIPE] --gpus 64 --tokens 1T
compile   compile the step: memory, collectives, predicted time    [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
serve     plan on a page of the browser, interactively             [RECIPE] --gpus 64

All but `serve` have --json, one object with a schema number, and --figure FILE.
"""

import importlib
import types
from collections.abc import Sequence

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import did_you_mean, require

VERBS = ("memory", "search", "schedule", "guide", "compile", "serve")


def main(argv: Sequence[str]) -> None:
    """Run the verb that the first word names."""
    arguments = list(argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    verb = arguments.pop(0) if arguments else ""
    with command_line.user_errors():
        fix = f"{did_you_mean(verb, VERBS)}choose one of {', '.join(VERBS)}"
        require(verb in VERBS, "verb", verb, fix)
    module_of(verb).main(arguments)


def module_of(verb: str) -> types.ModuleType:
    """Import the module of a verb."""
    package = "web" if verb == "serve" else "cli.plan_commands"
    return importlib.import_module(f"ultrascale_jax.{package}.{verb}")


def verbs() -> dict[str, type]:
    """Return the options of each verb."""
    return {verb: getattr(module_of(verb), "Options", common.Options) for verb in VERBS}
