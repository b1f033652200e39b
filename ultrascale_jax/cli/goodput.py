"""Account for every second of a run: `ultrascale goodput RUN_DIR`.

Over all its restarts each is in one class: productive steps, steps done again, start-up, compilation, waits for
checkpoints and batches, evaluation, hangs, and the time between tries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ultrascale_jax.cli import command_line
from ultrascale_jax.config import require
from ultrascale_jax.launch import events
from ultrascale_jax.launch.goodput import read_ledger


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale goodput`."""

    run_dir: tyro.conf.Positional[Path]
    """Its run directory."""


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale goodput"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        fix = f"holds no {events.FILE_NAME}; give the run directory of a training run"
        known = (options.run_dir / events.FILE_NAME).is_file()
        require(known, "run_dir", str(options.run_dir), fix)
        print(read_ledger(options.run_dir).table())
