"""Progress of the loop, told to the watchdog (`launch/watchdog.py`)."""

from ultrascale_jax.hooks import Hook, Row, Run


class Heartbeat(Hook):
    """A heartbeat a step. The sections between steps are told by `Run.pause`, waits for data by the loop."""

    def on_start(self, run: Run) -> None:
        run.watch.begin(run.step)

    def on_metrics(self, run: Run, row: Row) -> None:
        run.watch.beat(row["step"])

    def on_end(self, run: Run) -> None:
        if run.stopped:
            run.watch.reason = "stopped"
