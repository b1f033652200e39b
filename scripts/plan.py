"""Plan a run without its GPUs: `python -m scripts.plan VERB ...`; `VERB --help` says more.

memory    what one GPU holds, part by part, from formulas          [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
compile   what XLA makes of the step: memory, collectives, time    [RECIPE] --gpus 64 --mesh fsdp=8,sp=8
search    which mesh, micro-batch and recomputation are fastest    [RECIPE] --gpus 64 --global-batch-tokens 4M
schedule  pipeline schedules: tables, bubbles, figures             [NAME] --ranks 4 --microbatches 8
sweep     a grid of runs, measured here or predicted, as CSV       [RECIPE] --gpus 8
validate  the formulas beside measured runs                        RUNS.csv
report    figures of any of these, as PNG and one HTML file        FILE... or RECIPE --gpus 64
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from scripts import command_line
from ultrascale_jax.config import require

VERBS = ("memory", "compile", "search", "schedule", "sweep", "validate", "report")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    verb = arguments.pop(0) if arguments else ""
    with command_line.user_errors():
        require(verb in VERBS, "verb", verb, f"choose one of {', '.join(VERBS)}")
    try:
        try:
            importlib.import_module(f"scripts.plan_verbs.{verb}").main(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # as in `| head`; Python would complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


if __name__ == "__main__":
    main()
