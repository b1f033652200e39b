"""A supervisor over small programs that say they train: `python -m tests.supervised RUN_DIR RANKS BODY`. No JAX."""

import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tests.paths import ROOT
from ultrascale_jax.launch.sigterm import SignalListener
from ultrascale_jax.launch.supervisor import Supervisor

HEAD = """
import os, signal, sys, time
from pathlib import Path
from ultrascale_jax.launch.processes import follow_supervisor
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.goodput import read_beat
from ultrascale_jax.launch.watchdog import Watch

follow_supervisor(os.environ)
run_dir, rank, attempt = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["ULTRASCALE_ATTEMPT"])

def train(first, last, pause=0.02):
    for step in range(first + 1, last + 1):
        time.sleep(pause)
        watch.beat(step)
    # A thread writes it.
    while last > first and read_beat(run_dir, rank).step < last:
        time.sleep(0.01)

with Watch(Events(run_dir, rank), hang_s=float(sys.argv[2]) * (attempt == 0)) as watch:
    watch.begin(0)
"""


def supervise(
    run_dir: Path, body: str, ranks: Sequence[int] = (0, 1), hang_s: float = 0.0, **options
) -> Supervisor:
    """Return the supervisor of processes that run `body` in a `Watch`, whose `hang_s` bounds only their first start.

    `options` are the supervisor's.
    """
    program = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    command = [sys.executable, "-c", program, str(run_dir), str(hang_s)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Supervisor(
        lambda restarts: command,
        lambda: [{**environ, "RANK": str(rank)} for rank in ranks],
        ranks,
        run_dir,
        **options,
    )


if __name__ == "__main__":
    run_dir, ranks, body = sys.argv[1:]
    with SignalListener(signal.SIGINT) as listener:
        run = supervise(Path(run_dir), body, range(int(ranks)), signals=listener.signals)
        os._exit(run.run())
