"""Plan a run without its GPUs: `python -m scripts.plan compile [RECIPE] --gpus 8 [--mesh fsdp=4,sp=2] [...]`.

`compile` compiles the recipe's real training step for GPUs that are not there, and says how much memory one of them
needs, what travels over which mesh axis, and which of it the GPUs wait for.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from scripts import command_line
from ultrascale_jax.config import require

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options(command_line.Options):
    """What to plan for."""

    gpus: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """How many GPUs, eight to a host."""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = "h100"
    """Which GPU."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""

    def __post_init__(self):
        super().__post_init__()
        require(self.gpus >= 1, "gpus", self.gpus, "must be at least 1")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    with command_line.user_errors():
        verb = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
        asks_help = any(a in ("-h", "--help") for a in arguments)
        require(verb == "compile" or asks_help, "verb", verb, "write `scripts.plan compile RECIPE`")
    cfg, options = command_line.parse(
        arguments, prog="python -m scripts.plan compile", options=Options, description=__doc__
    )
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    from ultrascale_jax.plan.compile import compile_step

    with command_line.user_errors():
        step = compile_step(cfg, options.gpus, options.gpu)
    summary = summarize(step)
    if options.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(_memory(summary), _communication(summary))
    console.print(
        f"{summary['synchronous']} synchronous and {summary['asynchronous']} asynchronous collectives, "
        f"{summary['synchronous_in_loops']} synchronous inside loops; compiled in {summary['compile_s']:.0f} s"
    )


def summarize(step: Any) -> dict[str, Any]:
    """A `CompiledStep` as numbers: memory of one GPU in bytes, collectives by kind and axes for one step."""
    found = step.collectives
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(
        lambda: {"times": 0, "bytes": 0, "synchronous": 0}
    )
    for c in found:
        row = rows[c.kind, "*".join(c.axes)]
        row["times"] += c.times
        row["bytes"] += c.times * max(c.operand_bytes, c.result_bytes)
        row["synchronous"] += 0 if c.asynchronous else c.times
    memory = ("argument_bytes", "temporary_bytes", "host_bytes", "peak_bytes")
    waiting = [c for c in found if not c.asynchronous]
    return {
        **{name: getattr(step, name) for name in memory},
        "synchronous": len(waiting),
        "synchronous_in_loops": sum(bool(c.loops) for c in waiting),
        "asynchronous": len(found) - len(waiting),
        "compile_s": step.compile_s,
        "collectives": [
            {"kind": kind, "axes": axes, **row} for (kind, axes), row in sorted(rows.items())
        ],
    }


def _memory(summary: dict[str, Any]) -> Table:
    table = Table("memory of one GPU", "GiB", title_justify="left")
    for name in ("argument_bytes", "temporary_bytes", "host_bytes", "peak_bytes"):
        table.add_row(name.removesuffix("_bytes"), f"{summary[name] / GIB:.2f}")
    return table


def _communication(summary: dict[str, Any]) -> Table:
    table = Table("collective", "axes", "times a step", "GiB a step", "waited for")
    for row in summary["collectives"]:
        cells = (row["times"], f"{row['bytes'] / GIB:.2f}", row["synchronous"])
        table.add_row(row["kind"], row["axes"], *map(str, cells))
    return table


if __name__ == "__main__":
    main()
