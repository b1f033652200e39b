"""The training loop: feed the compiled step, and report, evaluate and save on the way.

The device never waits for the host. Step n+1 is dispatched before the metrics of step n are read, batches are prepared
ahead by the loader's threads, and checkpoints are written in the background. What a run does depends on its config, the
data and the step number alone, so a run that stops anywhere and resumes computes the same numbers.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path

import jax
from jax.sharding import Mesh

from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import check_same_run, describe
from ultrascale_jax.config import Config
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.health.replicas import Replicas
from ultrascale_jax.health.rerun import Steps
from ultrascale_jax.health.skipped_steps import Skips
from ultrascale_jax.health.stragglers import StepTimes
from ultrascale_jax.launch.distributed import StopRequest, guarded
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.faults import Plan
from ultrascale_jax.launch.goodput import read_ledger
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.launch.watchdog import Watch
from ultrascale_jax.parallel.context.layout import sequence_order
from ultrascale_jax.train_step.precision import check_kernels
from ultrascale_jax.train_step.state import TrainState, abstract_state, init_state
from ultrascale_jax.train_step.step import make_eval_step, make_train_step
from ultrascale_jax.training.describe import parallelism
from ultrascale_jax.training.metrics import RunLog, peak_memory_gb
from ultrascale_jax.training.profiler import Tracer
from ultrascale_jax.training.run_lock import alone
from ultrascale_jax.training.throughput import Rate


def train(
    cfg: Config,
    mesh: Mesh,
    *,
    profile: tuple[int, int] | None = None,
    faults: Plan | None = None,
) -> dict:
    """Train as `cfg` says, from the newest checkpoint in its run directory if there is one.

    Args:
        cfg: a checked config.
        mesh: the mesh of `cfg.mesh`.
        profile: write a trace of the steps from the first number up to, not including, the second to `run_dir/profile`.
        faults: what is to go wrong on purpose.

    Returns:
        What happened: `step` (the last one done), `stopped` (by SIGTERM, before the last step), `run_dir`, `loss`,
        `eval_loss`, `eval_tokens`, `skipped` (steps of this process that changed nothing), and of its steps after the
        first `step_s` and `tokens_per_s` (means), `tflops_per_device`, `mfu`; then `compile_s`, `first_step_s` (from
        the call to the end of the first step) and `hbm_gb`. What did not happen or is not known is none.

    Raises:
        UserError: the checkpoint is of another run, or the data or the pipeline's schedule cannot be used.
        Diverged: too many steps in a row were not finite, or spikes.
        ReplicasDiffer: a device's copy of an array is not that of the others.
    """
    started = time.monotonic()
    check_kernels(cfg, mesh.devices.flat[0])
    run_dir, parallel = Path(cfg.log.run_dir), parallelism(cfg)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        loader = make_loader(cfg)
        fresh = cfg.checkpoint.resume == "never"
        events = Events(run_dir, jax.process_index())
        events.check()
        still_alone = stack.enter_context(alone(run_dir, events))
        watch = stack.enter_context(Watch(events, hang_s=cfg.watch.hang_s, fresh=fresh))
        with watch.section("restore"):
            checkpoints = stack.enter_context(Checkpoints(cfg, events, faults, still_alone))
            state, first_step, notes = _start(cfg, mesh, loader, checkpoints)
        log = stack.enter_context(RunLog(run_dir, first_step=first_step, num_steps=cfg.train.steps))
        if jax.process_index() == 0:
            text = json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"
            write_atomic(run_dir / "config.json", text.encode())
        for note in parallel + notes:
            log.note(note)
        tracer = stack.enter_context(Tracer(run_dir / "profile", profile))
        stop = stack.enter_context(StopRequest())
        # Innermost: to close a checkpoint may take processes that wait for this one.
        stack.enter_context(guarded(events.record, refusals=False))
        run = _Run(
            cfg, mesh, loader, checkpoints, log, watch, events, faults or Plan.none(), started
        )
        return run.run(state, first_step, stop, tracer)


def make_loader(cfg: Config) -> Loader:
    """The training batches of `cfg`, in the order of tokens that its context parallelism wants."""
    return Loader(
        cfg.data,
        vocab_size=cfg.model.vocab_size,
        global_batch=cfg.train.global_batch,
        seed=cfg.train.seed,
        together=True,
        order=sequence_order(cfg.data.seq_len, cfg.mesh.cp, cfg.cp) if cfg.mesh.cp > 1 else None,
    )


SUMMARY = ("loss", "eval_loss", "eval_tokens", "compile_s", "first_step_s", "skipped")


class _Run:
    """What one call of `train` holds besides the state."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        loader: Loader,
        checkpoints: Checkpoints,
        log: RunLog,
        watch: Watch,
        events: Events,
        faults: Plan,
        started: float,
    ):
        self.cfg, self.mesh, self.loader = cfg, mesh, loader
        self.checkpoints, self.log, self.watch = checkpoints, log, watch
        self.events, self.faults, self.started = events, faults, started
        self.fingerprint, self.held_out = loader.fingerprint, loader.held_out()
        self.eval_step: Callable = make_eval_step(cfg)
        self.rate = Rate(cfg, mesh)
        self.times = StepTimes(cfg.watch.straggler_every, self.events, log.note)
        self.summary: dict = dict.fromkeys(SUMMARY)
        self.save_is_late = False

    def run(self, state: TrainState, first_step: int, stop: StopRequest, tracer: Tracer) -> dict:
        """The steps after `first_step`; see `train`."""
        self.skips = Skips(self.cfg, self.loader, self.events, int(state.skipped_in_a_row))
        self.replicas = Replicas(self.cfg.watch.replicas_every, self.mesh, state, self.events)
        for note in self.replicas.notes:
            self.log.note(note)
        step, pending, train_step = first_step, None, None
        stopped = stop.reached() and step < self.cfg.train.steps
        self.watch.begin(first_step)
        with contextlib.closing(self._batches(first_step)) as batches:
            while step < self.cfg.train.steps and not stopped:
                asked = time.monotonic()
                with self.watch.data(lambda pending=pending: _is_busy(pending)):
                    _, batch, digest = next(batches)
                wait_s = time.monotonic() - asked
                if train_step is None:
                    train_step = self._compile(state, batch)
                    if stopped := stop.reached():
                        break
                step += 1
                self.faults.strike(step)
                if tracer.turns(step):
                    pending = self._read(pending)
                    with self.watch.section("profile"):
                        tracer.turn(state)
                    self.rate.restart()
                with self.times.waiting():
                    state, metrics = train_step.take(step, state, batch, digest)
                self._read(pending)
                pending = (step, metrics, digest, wait_s)
                stopped = stop.reached() and step < self.cfg.train.steps
                self.times.step(step)
                pending = self._pause(state, step, stopped, pending)
        if stopped:
            self.watch.reason = "stopped"
            where = f"after step {step}" if step > first_step else f"before step {step + 1}"
            self.log.note(f"stopped by SIGTERM {where}; the same command continues")
        else:
            self._evaluate(state, step)
        if jax.process_index() == 0:
            self.log.note(read_ledger(Path(self.cfg.log.run_dir)).line())
        self.summary |= {"step": step, "stopped": stopped, "run_dir": self.cfg.log.run_dir}
        self.summary["skipped"] = self.skips.total
        return {**self.summary, **self.rate.mean(), "hbm_gb": peak_memory_gb() or None}

    def _batches(self, first_step: int) -> Generator:
        return self.loader.device_batches(self.mesh, first_step, before=self.faults.load)

    def _pause(
        self, state: TrainState, step: int, stopped: bool, pending: tuple | None
    ) -> tuple | None:
        """Compare, evaluate and save after `step` what is due; the evaluation after the last step comes later.

        A skipped step has left the state as it was, so a save that is due waits for the next good step. The last one
        of the process is written all the same, but deletes no older one: good checkpoints outlive a run of bad steps.
        Returns the step that is still to be read, none where it waited for it.
        """

        def every(n: int) -> bool:
            return n > 0 and step % n == 0

        last = stopped or step == self.cfg.train.steps
        evaluates = every(self.cfg.train.eval_every) and not last
        saves = self.save_is_late or every(self.cfg.checkpoint.every) or last
        if not (evaluates or saves or self.replicas.due(step, saves)):
            return pending
        # Everything up to this step is on record before the checkpoint is.
        self._read(pending)
        self.save_is_late = saves and self.skips.skipping and not last
        saves = saves and not self.save_is_late
        if self.replicas.due(step, saves):
            with self.watch.section("compare"):
                self.replicas.check(step, state)
        if evaluates:
            self._evaluate(state, step)
        if saves:
            meta = describe(self.cfg, step, self.fingerprint)
            with self.watch.section("save"):
                self.checkpoints.save(state, meta, wait=last, rotate=not self.skips.skipping)
        self.rate.restart()
        self.times.restart()
        return None

    def _compile(self, state: TrainState, batch: dict) -> Steps:
        begun = time.monotonic()
        with self.watch.section("compile"):
            train_step = make_train_step(self.cfg).lower(state, batch).compile()
        self.summary["compile_s"] = time.monotonic() - begun
        self.log.note(f"compiled the step in {self.summary['compile_s']:.1f} s")
        self.rate.restart()
        return Steps(train_step, self.cfg.watch.rerun, self.faults, self.events)

    def _read(self, pending: tuple | None) -> None:
        """Wait for a dispatched step and record its metrics; stop the run if it was one too many to skip."""
        if pending is None:
            return
        step, metrics, digest, wait_s = pending
        with self.times.waiting():
            values = jax.device_get(metrics)
        self.watch.beat(step)
        row = {name: float(values[name]) for name in ("loss", "grad_norm", "lr")}
        row |= {"tokens": int(values["tokens"]), **self.rate.step(), "hbm_gb": peak_memory_gb()}
        row |= {name: v.tolist() for name, v in values.items() if name.startswith("moe_")}
        if "loss_scale" in values:
            row["loss_scale"] = float(values["loss_scale"])
        if "spike" in values:
            row["spike"] = bool(values["spike"])
        skipped = bool(values["skipped"])
        self.log.step(
            {
                "step": step,
                **row,
                "skipped": skipped,
                "data_wait_s": wait_s,
                "batch_hash": digest,
                "save_failures": self.checkpoints.failures or None,
                "time": time.time(),
            }
        )
        if self.summary["first_step_s"] is None:
            self.summary["first_step_s"] = time.monotonic() - self.started
        if not skipped:
            self.summary["loss"] = row["loss"]
        self.skips.read(step, values, digest, self.checkpoints.latest)

    def _evaluate(self, state: TrainState, step: int) -> None:
        with self.watch.section("evaluate"):
            self._held_out_loss(state, step)

    def _held_out_loss(self, state: TrainState, step: int) -> None:
        """Mean loss over the same first batches of the held-out split every time."""
        size = self.cfg.train.global_batch
        # Rows beyond one epoch would count documents twice; a split smaller than one batch fills it by repeating.
        batches = min(self.cfg.train.eval_batches, max(self.held_out.num_sequences // size, 1))
        if self.held_out.num_sequences == 0:
            self.log.note(
                "no evaluation: the held-out documents do not fill one row of data.seq_len tokens"
            )
            return
        nats, tokens = 0.0, 0
        with contextlib.closing(self.held_out.device_batches(self.mesh, 0)) as held_out:
            for _ in range(batches):
                _, batch, _ = next(held_out)
                batch_nats, batch_tokens = jax.device_get(self.eval_step(state.params, batch))
                nats, tokens = nats + float(batch_nats), tokens + int(batch_tokens)
        self.summary |= {"eval_loss": nats / max(tokens, 1), "eval_tokens": tokens}
        self.log.evaluation(step, self.summary["eval_loss"], tokens)


def _start(
    cfg: Config, mesh: Mesh, loader: Loader, checkpoints: Checkpoints
) -> tuple[TrainState, int, list[str]]:
    """The state to go on from, the step it stands at, and what to tell about it."""

    def accept(meta: dict, place: Path) -> list[str]:
        return check_same_run(meta, cfg, loader.fingerprint, place)

    return checkpoints.resume(abstract_state(cfg, mesh), accept) or (init_state(cfg, mesh), 0, [])


def _is_busy(pending: tuple | None) -> bool:
    """Whether the devices still compute what was sent to them last."""
    return pending is not None and not pending[1]["loss"].is_ready()
