"""Save a checkpoint every `checkpoint.every` steps, and at the last step of a process."""

from collections.abc import Callable

from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.hooks import Hook, Row, Run


class PeriodicSave(Hook):
    """Saves in the background, and waits only for the last save.

    A skipped step has left the state as it was, so a save that is due waits for the next good step. The last one of the
    process is written all the same, but deletes no older one: good checkpoints outlive a run of bad steps.
    """

    def __init__(self, checkpoints: Checkpoints, fingerprint_at: Callable[[int], str]):
        """`fingerprint_at` returns the fingerprint of the data that this number of steps has read."""
        self._checkpoints, self._fingerprint_at = checkpoints, fingerprint_at
        self._late = self._skipped = False

    def on_metrics(self, run: Run, row: Row) -> None:
        self._skipped = row["skipped"]
        row["save_failures"] = self._checkpoints.failures or None

    def after_step(self, run: Run) -> None:
        if not (self._late or run.every(run.cfg.checkpoint.every) or run.is_last):
            return
        # Everything up to this step is on record before the checkpoint is.
        run.read_metrics()
        self._late = self._skipped and not run.is_last
        if self._late:
            return
        for hook in run.hooks:
            hook.before_save(run)
        with run.pause("save"):
            meta = describe(run.cfg, run.step, self._fingerprint_at(run.step))
            self._checkpoints.save(run.state, meta, wait=run.is_last, rotate=not self._skipped)
        for hook in run.hooks:
            hook.on_save(run)

    def on_end(self, run: Run) -> None:
        """Wait for the copies of the checkpoints; each pause is a sign of life to the watchdog."""
        copied = not run.cfg.checkpoint.store
        while not copied:
            with run.pause("save"):
                copied = self._checkpoints.wait_for_copies()
