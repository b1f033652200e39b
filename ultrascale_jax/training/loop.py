"""The training loop: feed the compiled step, and call the hooks around it.

The device never waits for the host. Step n+1 is dispatched before the metrics of step n are read, batches are prepared
ahead by the loader's threads, and checkpoints are written in the background. A step depends on the config, the data and
the step number alone, so a run that stops anywhere and resumes computes the same numbers.

Everything else that a run does is a hook: `ultrascale_jax/hooks.py` says how to add one, `setup.py` lists the built-in.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import jax
from jax.sharding import Mesh

from ultrascale_jax.config import Config
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.data.loader import StartHash
from ultrascale_jax.hooks import Batch, Hook, Run, StepFn
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.train_step.step import make_train_step
from ultrascale_jax.training.compilation_cache import compile_step
from ultrascale_jax.training.setup import open_run


def train(
    cfg: Config,
    mesh: Mesh,
    *,
    model: type[Transformer] = Transformer,
    hooks: Sequence[Hook] = (),
    profile: tuple[int, int] | None = None,
) -> dict:
    """Train as `cfg` says, from the newest checkpoint in its run directory if there is one.

    Args:
        cfg: a checked config.
        mesh: the mesh of `cfg.mesh`.
        model: the class of the model, with layers of your own say (`docs/layers.md`).
        hooks: called around each step, after the built-in ones but before rows are written and checkpoints saved.
        profile: write a trace of the steps from the first number up to, not including, the second to `run_dir/profile`.

    Returns:
        Results by name: `step` (the last one done), `stopped` (by SIGTERM, before the last step), `run_dir`, `loss`,
        `eval_loss`, `eval_tokens`, `eval_loss_NAME` of each named source of `data.eval_source`, `skipped` (steps of
        this process that changed nothing), and of its steps after the first `step_s` and `tokens_per_s` (means),
        `tflops_per_device`, `mfu`; then `compile_s`, `first_step_s` (from the call to the end of the first step) and
        `hbm_gib`. Results that did not happen or are not known are none.

    Raises:
        UserError: the checkpoint is of another run, or the data or the pipeline's schedule cannot be used.
        Diverged: too many steps in a row were not finite, or spikes.
        ReplicasDiffer: a device's copy of an array is not that of the others.
    """
    with open_run(cfg, mesh, model=model, hooks=hooks, profile=profile) as run:
        run.check_stop()
        run.watch.begin(run.step)
        for hook in run.hooks:
            hook.on_start(run)
        with contextlib.closing(_batches(run)) as batches:
            _run_steps(run, batches)
        if run.stopped:
            run.watch.reason = "stopped"
        for hook in run.hooks:
            hook.on_end(run)
        steps = {"step": run.step, "stopped": run.stopped, "run_dir": cfg.log.run_dir}
        return run.summary | steps


def _run_steps(run: Run, batches: Iterable[Batch]) -> None:
    """Run the steps after `run.step`."""
    step_fn: StepFn | None = None
    size = 0
    for batch in batches:
        if step_fn is None or batch["tokens"].shape[0] != size:
            size = batch["tokens"].shape[0]
            step_fn = None  # frees the old one's device memory
            step_fn = _compile(run, batch)
            if run.check_stop():
                break
        run.step += 1
        for hook in run.hooks:
            hook.before_step(run)
        with run.waiting_for_devices():
            run.state, metrics = step_fn(run.state, batch)
        run.dispatched(metrics)
        run.check_stop()
        for hook in run.hooks:
            hook.after_step(run)


def _compile(run: Run, batch: Batch) -> StepFn:
    """Compile the step for batches of this size; a run has another size in each stage of `train.batch_ramp`."""
    begun, size = time.monotonic(), batch["tokens"].shape[0]
    cfg = run.cfg.of_batch(size) if run.cfg.train.batch_ramp else run.cfg
    with run.pause("compile"):
        lowered = make_train_step(cfg).lower(run.state, batch)
        program, loaded = compile_step(lowered, Lowering.of(cfg).xla_options, run.note)
        step_fn: StepFn = program
    seconds = time.monotonic() - begun
    run.summary["compile_s"] = (run.summary["compile_s"] or 0.0) + seconds
    ramp = f" of {size} sequences (micro-batches: {cfg.train.microbatches})"
    run.note(
        f"{'loaded' if loaded else 'compiled'} the step{ramp if run.cfg.train.batch_ramp else ''} in {seconds:.1f} s"
    )
    for hook in run.hooks:
        step_fn = hook.wrap_step(run, step_fn)
    return step_fn


def _batches(run: Run) -> Generator[Batch]:
    """Yield the batch of each step until the last, or until the run is to stop."""
    with contextlib.closing(run.batches) as batches:
        while not run.is_last:
            start = time.monotonic()
            with run.watch.data(run.is_busy):
                _, batch, start_hash = next(batches)
            run.data_wait_s = time.monotonic() - start
            run.batch_hash = _start_hash(run, start_hash)
            yield batch


def _start_hash(run: Run, start_hash: StartHash) -> Callable[[], str]:
    """Begin to hash the step's batch; on CPUs of several processes do it while no step runs.

    Gloo mixes up collectives of programs that run at once (`_order_cpu_collectives` in `launch/distributed.py`).
    """
    if jax.process_count() == 1 or run.mesh.devices.flat[0].platform != "cpu":
        return start_hash()
    with run.waiting_for_devices():
        jax.block_until_ready(run.state)
        batch_hash = start_hash()
        batch_hash()
    return batch_hash
