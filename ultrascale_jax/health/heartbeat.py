"""Report the loop's progress to the watchdog (`launch/watchdog.py`)."""

from ultrascale_jax.hooks import Hook, Row, Run


class Heartbeat(Hook):
    """Beats once a step. `Run.pause` reports the sections between steps, the loop its waits for data."""

    def on_start(self, run: Run) -> None:
        run.watch.begin(run.step)

    def on_metrics(self, run: Run, row: Row) -> None:
        run.watch.beat(row["step"])

    def on_end(self, run: Run) -> None:
        if run.stopped:
            run.watch.reason = "stopped"
