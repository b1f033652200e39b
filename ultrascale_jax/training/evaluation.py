"""Evaluate the held-out split, every `train.eval_every` steps and at the end."""

import contextlib

import jax

from ultrascale_jax.config import Config
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.hooks import Hook, Run
from ultrascale_jax.train_step.step import make_eval_step


class Evaluation(Hook):
    """Takes the mean loss over the same first batches of the held-out split every time."""

    def __init__(self, cfg: Config, loader: Loader):
        self._held_out, self._eval_step = loader.held_out(), make_eval_step(cfg)

    def on_start(self, run: Run) -> None:
        run.summary |= {"eval_loss": None, "eval_tokens": None}

    def after_step(self, run: Run) -> None:
        # That of the last step waits until it is saved.
        if run.every(run.cfg.train.eval_every) and not run.is_last:
            self._evaluate(run)

    def on_end(self, run: Run) -> None:
        if not run.stopped:
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        if self._held_out.num_sequences == 0:
            run.note(
                "no evaluation: the held-out documents do not fill one row of data.seq_len tokens"
            )
            return
        with run.pause("evaluate"):
            loss, tokens = self._mean_loss(run)
            run.summary |= {"eval_loss": loss, "eval_tokens": tokens}
            for hook in run.hooks:
                hook.on_evaluation(
                    run, {"step": run.step, "eval_loss": loss, "eval_tokens": tokens}
                )

    def _mean_loss(self, run: Run) -> tuple[float, int]:
        """Return the mean loss in nats and the number of tokens that it counts."""
        # Rows beyond one epoch would count documents twice; a split smaller than one batch fills it by repeating.
        epoch = max(self._held_out.num_sequences // run.cfg.train.global_batch, 1)
        nats, tokens = 0.0, 0
        with contextlib.closing(self._held_out.device_batches(run.mesh, 0)) as batches:
            for _ in range(min(run.cfg.train.eval_batches, epoch)):
                _, batch, _ = next(batches)
                batch_nats, batch_tokens = jax.device_get(self._eval_step(run.state.model, batch))
                nats, tokens = nats + float(batch_nats), tokens + int(batch_tokens)
        return nats / max(tokens, 1), tokens
