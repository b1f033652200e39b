"""Evaluate on `data.eval_source` or the held-out split, every `train.eval_every` steps and at the end."""

import contextlib
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from ultrascale_jax.config import Config
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.hooks import Batch, Hook, Row, Run
from ultrascale_jax.train_step import preference
from ultrascale_jax.train_step.forward_steps import make_eval_step, make_pair_step
from ultrascale_jax.train_step.objective import Metrics


def mean_loss(nats: float, tokens: int) -> float:
    """Return the mean loss of a target in nats; NaN if there is no target, whose loss of 0 would be a perfect one."""
    return nats / tokens if tokens else math.nan


class Evaluation(Hook):
    """Takes the mean loss over the same first batches of each loader every time.

    `Loader.evaluation` returns `loaders`. A loader with a name has its own loss in addition to the loss of all tokens.
    """

    def __init__(self, cfg: Config, loaders: Mapping[str, Loader]):
        self._loaders, self._eval_step = loaders, make_eval_step(cfg)

    def on_start(self, run: Run) -> None:
        run.summary |= {"eval_loss": None, "eval_tokens": None}

    def after_step(self, run: Run) -> None:
        # The evaluation of the last step waits until it is saved.
        if run.every(run.cfg.train.eval_every) and not run.is_last:
            self._evaluate(run)

    def on_end(self, run: Run) -> None:
        if not run.stopped:
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        if not any(loader.num_sequences for loader in self._loaders.values()):
            run.note(
                "no evaluation: the held-out documents do not fill one row of data.seq_len tokens"
            )
            return
        with run.pause("evaluate"):
            losses = self._losses(run)
            run.summary |= losses
            for hook in run.hooks:
                hook.on_evaluation(run, {"step": run.step, **losses})

    def _losses(self, run: Run) -> Row:
        """Return the mean loss in nats and the number of tokens that it counts, and the mean loss by name."""
        sums = {name: self._sums(run, loader) for name, loader in self._loaders.items()}
        nats, tokens = (sum(parts) for parts in zip(*sums.values(), strict=True))
        total = {"eval_loss": mean_loss(nats, tokens), "eval_tokens": tokens}
        named = {f"eval_loss_{name}": mean_loss(n, t) for name, (n, t) in sums.items() if name}
        return total | named

    def _sums(self, run: Run, loader: Loader) -> tuple[float, int]:
        """Return the sum of nats and the number of tokens that it counts."""
        nats, tokens = 0.0, 0
        for batch in self._batches(run, loader):
            batch_nats, batch_tokens = jax.device_get(self._eval_step(run.state.model, batch))
            nats, tokens = nats + float(batch_nats), tokens + int(batch_tokens)
        return nats, tokens

    def _batches(self, run: Run, loader: Loader) -> Iterator[Batch]:
        """Yield the batches of an evaluation."""
        # Rows beyond one epoch would count documents twice; a split smaller than one batch fills it by repeating.
        epoch = max(loader.num_sequences // run.cfg.train.global_batch, 1)
        with contextlib.closing(loader.device_batches(run.mesh, 0)) as batches:
            for _ in range(min(run.cfg.train.eval_batches, epoch)):
                yield next(batches)[1]


class PreferenceEvaluation(Evaluation):
    """Takes the mean loss of `train.dpo` over pairs, and their rewards, in place of the loss of tokens."""

    def __init__(self, cfg: Config, loaders: Mapping[str, Loader]):
        super().__init__(cfg, loaders)
        self._pair_step = make_pair_step(cfg)

    def _losses(self, run: Run) -> Row:
        """Return the mean loss of a pair, `preference.metrics` after `eval_`, and the mean loss by name."""
        of = {name: self._pair_sums(run, loader) for name, loader in self._loaders.items()}
        whole = jax.tree.map(lambda *parts: sum(parts), *of.values())
        means = preference.metrics(whole["sums"], whole["pairs"])
        losses = {"loss": whole} | {f"loss_{name}": sums for name, sums in of.items() if name}
        means |= {
            name: sums["loss"] / jnp.maximum(sums["pairs"], 1) for name, sums in losses.items()
        }
        return {f"eval_{name}": value.tolist() for name, value in jax.device_get(means).items()}

    def _pair_sums(self, run: Run, loader: Loader) -> Metrics:
        """Return the sums of `make_pair_step` over an evaluation."""
        sums = [self._pair_step(run.state, batch) for batch in self._batches(run, loader)]
        return jax.tree.map(lambda *parts: sum(parts), *sums)
