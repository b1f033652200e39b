"""Set up a run around its steps: data, run directory, state, and the built-in hooks."""

import contextlib
import dataclasses
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ultrascale_jax.checkpoint.init_from import check_run_dir, initial_params
from ultrascale_jax.checkpoint.manager import Checkpoints, fits
from ultrascale_jax.checkpoint.periodic_save import PeriodicSave
from ultrascale_jax.checkpoint.run_metadata import check_same_run, config_from_dict, config_text
from ultrascale_jax.config import Config, require, require_type
from ultrascale_jax.data.corpus import Corpus
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.data.top_k import TopK
from ultrascale_jax.health.replicas import ReplicaCheck
from ultrascale_jax.health.rerun import Rerun
from ultrascale_jax.health.skipped_steps import SkippedSteps
from ultrascale_jax.health.stragglers import StragglerCheck, cadence
from ultrascale_jax.hooks import Hook, Run
from ultrascale_jax.kernels.choices import HOPPER
from ultrascale_jax.kernels.document_classes import max_documents
from ultrascale_jax.launch.distributed import StopRequest, guarded
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.multihost import on_process0
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.launch.run_lock import run_lock
from ultrascale_jax.launch.watchdog import Watch
from ultrascale_jax.models.frozen_fp8 import rest, with_amaxes
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.plan.model_shape import adapter_params
from ultrascale_jax.sharding.mesh import check_mesh
from ultrascale_jax.train_step.objective import check_term_names
from ultrascale_jax.train_step.optim import rate_change
from ultrascale_jax.train_step.precision import attention_call, check_kernels
from ultrascale_jax.train_step.state import (
    TrainState,
    abstract_state,
    check_model,
    fresh_state,
    init_state,
)
from ultrascale_jax.training.describe import pipeline_notes
from ultrascale_jax.training.evaluation import Evaluation, PreferenceEvaluation
from ultrascale_jax.training.metrics import COLUMNS, RunLog
from ultrascale_jax.training.profiler import Profiler
from ultrascale_jax.training.throughput import Throughput
from ultrascale_jax.training.trackers import Trackers, chosen

MOST_COMPARED = 1 << 24
"""Most documents of a run's sources that are compared with `data.eval_source`: a minute's work."""


@contextlib.contextmanager
def open_run(
    cfg: Config,
    mesh: Mesh,
    *,
    hooks: Sequence[Hook],
    profile: tuple[int, int] | None,
    model: type[Transformer] = Transformer,
) -> Iterator[Run]:
    """Take the run directory, and yield the run with its state: the newest checkpoint's, or a new one.

    Inside the block `mesh` is set. See `train` for the arguments and the errors.
    """
    check_mesh(cfg.mesh, mesh)
    cfg = cfg.check(mesh.size)
    check_run_dir(cfg)
    with contextlib.ExitStack() as stack:
        yield _enter(stack, cfg, mesh, model, hooks, profile)


def _enter(
    stack: contextlib.ExitStack,
    cfg: Config,
    mesh: Mesh,
    model: type[Transformer],
    hooks: Sequence[Hook],
    profile: tuple[int, int] | None,
) -> Run:
    """Enter the contexts of a run in this order; `stack` leaves it in the opposite one."""
    started, run_dir = time.monotonic(), Path(cfg.log.run_dir)
    require_type("hooks", hooks, Sequence, "[MyHook()] say")
    for hook in hooks:
        require(isinstance(hook, Hook), "hooks", hook, "must be instances of Hook, as [MyHook()]")
    check_model(model)
    check_term_names(model, {*COLUMNS, "time"})
    check_kernels(cfg, mesh.devices.flat[0])
    chosen(cfg.log.to)  # raises where a package is missing
    notes = pipeline_notes(cfg)
    stack.enter_context(jax.set_mesh(mesh))
    loader = make_loader(cfg)
    evaluation = loader.evaluation()
    for held_out in evaluation.values():
        check_pairs(cfg, held_out)
    notes += loader.notes + trained_on(loader, evaluation)
    if mesh.devices.flat[0].platform == "gpu" and cfg.data.document_mask:
        cfg, fallback = fit_loaders(cfg, (loader, *evaluation.values()))
        notes += fallback
    events = Events(run_dir, jax.process_index())
    events.check()
    on_process0(lambda: _lock(stack, run_dir, events))
    fresh = cfg.checkpoint.resume == "never"
    watch = stack.enter_context(Watch(events, hang_s=cfg.watch.hang_s, fresh=fresh))
    with watch.section("restore"):
        checkpoints = stack.enter_context(Checkpoints(cfg))
        state, step, changes = _state(cfg, mesh, model, loader, checkpoints)
    log = stack.enter_context(RunLog(run_dir, first_step=step, num_steps=cfg.train.steps))
    if jax.process_index() == 0:
        write_atomic(run_dir / "config.json", config_text(cfg).encode())
    for note in notes + loader.describe(cfg.train.steps) + changes:
        log.note(note)
    trackers = stack.enter_context(Trackers(cfg, step))
    profiler = stack.enter_context(Profiler(run_dir, profile))
    stop = stack.enter_context(StopRequest())
    # Innermost: to close a checkpoint may take processes that wait for this one.
    stack.enter_context(guarded(events.record, refusals=False))
    return Run(
        cfg,
        mesh,
        state,
        step=step,
        batches=loader.device_batches(mesh, step),
        events=events,
        watch=watch,
        note=log.note,
        stop=stop,
        hooks=_all_hooks(
            cfg, mesh, loader, evaluation, checkpoints, log, trackers, profiler, hooks
        ),
        started=started,
    )


def _lock(stack: contextlib.ExitStack, run_dir: Path, events: Events) -> None:
    """Take the run directory for this job alone. Raises `UserError` where another job holds it."""
    if (note := stack.enter_context(run_lock(run_dir))) is not None:
        say(note)
        events.record("lock", note=note)


def _all_hooks(
    cfg: Config,
    mesh: Mesh,
    loader: Loader,
    evaluation: Mapping[str, Loader],
    checkpoints: Checkpoints,
    log: RunLog,
    trackers: Trackers,
    profiler: Profiler,
    user_hooks: Sequence[Hook],
) -> list[Hook]:
    """Return the hooks of a run in the order in which they are called, with `user_hooks` among them."""
    return [
        profiler,  # it reads the compiled step, before others wrap it
        *([Rerun()] if cfg.watch.rerun else []),
        StragglerCheck(cadence(cfg.train.steps)),
        Throughput(cfg, mesh),
        # In this order: unequal replicas are not evaluated, and an evaluation is on record before its checkpoint.
        ReplicaCheck(cfg.watch.replicas_every),
        (PreferenceEvaluation if cfg.train.dpo.enabled else Evaluation)(cfg, evaluation),
        *user_hooks,
        PeriodicSave(checkpoints, loader.fingerprint_at),
        # These see rows that are complete; the last one may end the run.
        log,
        trackers,
        SkippedSteps(loader, newest=lambda: checkpoints.latest),
    ]


def make_loader(cfg: Config) -> Loader:
    """Return the training batches of `cfg`, as `train` reads them, in the order of tokens of its mesh and `cp`.

    Every process of a job calls it. `held_out()` of the loader has the batches of an evaluation.

    Raises:
        UserError: as `Loader` and `TopK` do; or preference pairs without `train.dpo`, or anything else with it.
    """
    loader = Loader(
        cfg.data,
        vocab_size=cfg.model.vocab_size,
        global_batch=cfg.train.batches,
        steps=cfg.train.steps,
        seed=cfg.train.seed,
        microbatches=cfg.train.microbatches,
        share_checks=True,
        cp=cfg.mesh.cp,
        context=cfg.cp,
    )
    check_pairs(cfg, loader)
    if cfg.train.distill.stored:
        loader.teacher = TopK(cfg, loader)
    return loader


def check_pairs(cfg: Config, loader: Loader) -> None:
    """Refuse preference pairs without `train.dpo`, and anything else with it."""
    for name, corpus in zip(loader.sources.mixture.names, loader.sources.corpora, strict=True):
        pairs = isinstance(corpus, Corpus) and corpus.pairs
        fix = "holds preference pairs; give --train.dpo.beta 0.1, and the model to tune by --train.init-from"
        require(cfg.train.dpo.enabled or not pairs, "data.source", name, fix)
        make = f"ultrascale prepare-data --preferences --input 'FILES' --out DIR --tokenizer {cfg.data.tokenizer}"
        fix = f"holds no preference pairs, which train.dpo learns from; make shards of them: {make}"
        require(pairs or not cfg.train.dpo.enabled, "data.source", name, fix)


def trained_on(loader: Loader, evaluation: Mapping[str, Loader]) -> list[str]:
    """Return a line for each source of `data.eval_source` that has documents of the training data, on process 0.

    Shards are read one by one; of more than `MOST_COMPARED` documents a line says that they are not compared.
    """
    if not loader.data.eval_source or jax.process_index():
        return []
    trained = loader.sources.texts
    everything = [
        *trained,
        *(corpus for one in evaluation.values() for corpus in one.sources.texts),
    ]
    if (documents := sum(int(corpus.counts.sum()) for corpus in everything)) > MOST_COMPARED:
        return [
            f"whether documents of data.eval_source are in data.source was not looked up: they have {documents:,}"
        ]
    lines = []
    for name, one in evaluation.items():
        parts = [part["hash"] for corpus in one.sources.texts for part in corpus.documents]
        hashes = np.concatenate([np.zeros(0, np.uint64), *parts])
        shared = np.zeros(hashes.size, bool)
        for corpus in trained:
            for part in corpus.documents:
                shared |= np.isin(hashes, part["hash"])
        if shared.any():
            of = f"data.eval_source{name and f' {name}'}"
            lines.append(
                f"{shared.sum()} of the {hashes.size} documents of {of} are in data.source too"
            )
    return lines


def fit_loaders(cfg: Config, loaders: Sequence[Loader]) -> tuple[Config, list[str]]:
    """Do `fit_documents` for the rows of these loaders, of which not all are counted where a corpus is large.

    A row for whose documents packed attention has no room then stops the run.
    """
    cfg, notes = fit_documents(cfg, max(loader.max_documents for loader in loaders))
    if packs_documents(cfg):
        for loader in loaders:
            loader.room = _room(cfg)
    return cfg, notes


def fit_documents(cfg: Config, most: int) -> tuple[Config, list[str]]:
    """Give attention a mask if a row can have `most` documents and packed attention has no room for them.

    Returns:
      The configuration, and lines to print about it.

    Raises:
      UserError: `kernels.attention` asks for packed attention all the same.
    """
    chosen, seq_len, room = cfg.kernels.attention, cfg.data.seq_len, _room(cfg)
    if not packs_documents(cfg) or most <= room:
        return cfg, []
    fault = f"a row of {seq_len} tokens can have {most} documents, and has room for {room}"
    fix = f"{fault}; use auto or cudnn, which read a mask, or leave out the shortest documents"
    require(chosen == "auto", "kernels.attention", chosen, fix)
    kernels = dataclasses.replace(cfg.kernels, attention="cudnn")
    return dataclasses.replace(cfg, kernels=kernels), [f"attention reads a document mask: {fault}"]


def _room(cfg: Config) -> int:
    """Return how many documents a row may have, all of which may be at one place of a ring."""
    return max_documents(cfg.data.seq_len // cfg.cp.ranks(cfg.mesh.cp)[0])


def packs_documents(cfg: Config) -> bool:
    """Return whether a Hopper GPU takes packed attention, which has room for so many documents in a row."""
    calls = (attention_call(cfg, HOPPER[0], layer=i) for i in range(cfg.model.layer_group))
    return any(call.packs(cfg.kernels.attention) for call in calls)


def _state(
    cfg: Config, mesh: Mesh, model: type[Transformer], loader: Loader, checkpoints: Checkpoints
) -> tuple[TrainState, int, list[str]]:
    """Restore the newest checkpoint, or create a new state; return it, its step, and lines to print about it."""

    abstract = abstract_state(cfg, mesh, model)
    saved = cfg

    def accept(meta: dict, place: object) -> list[str]:
        nonlocal saved
        saved = config_from_dict(meta["config"])
        return check_same_run(
            meta,
            cfg,
            loader.fingerprint_at(meta["data"]["step"]),
            place,
            tokenizer=loader.tokenizer.fingerprint,
            fits=fits(abstract, meta),
        )

    resumed = checkpoints.resume(abstract, accept)
    for field in ("train.lora.rank", "train.dpo.beta"):
        fix = "needs a model that has learned: give --train.init-from hf:DIR or RUN_DIR"
        value = operator.attrgetter(field)(cfg)
        require(not value or bool(cfg.train.init_from), field, value, fix)
    state, step, notes = resumed or _first_state(cfg, mesh, model, abstract)
    notes += rate_change(saved, cfg, step - int(state.skipped))
    if cfg.train.lora.enabled:
        notes += [f"training {adapter_params(cfg.model, cfg.train.lora):,} parameters of adapters"]
    distill = cfg.train.distill
    if distill.enabled:
        notes += [f"learning from {distill.teacher}"]
    frozen, reference = abstract.frozen, abstract.reference
    if frozen is not None:
        state = dataclasses.replace(state, frozen=_base(cfg, mesh, model, frozen))
    if reference is not None:
        source = "train.distill.teacher" if distill.enabled else "train.init_from"
        reference = initial_params(cfg, reference, mesh, source)
        state = dataclasses.replace(state, reference=reference)
    return state, step, notes


def _base(cfg: Config, mesh: Mesh, model: type[Transformer], frozen: Transformer) -> Transformer:
    """Load the base of adapters, of the shapes `frozen`; parameters stored in fp8 are quantised one by one."""
    if not cfg.frozen_in_fp8:
        return initial_params(cfg, frozen, mesh)
    train = dataclasses.replace(cfg.train, precision="bf16")
    loaded = abstract_state(dataclasses.replace(cfg, train=train), mesh, model).frozen
    assert loaded is not None  # the run has adapters
    return with_amaxes(initial_params(cfg, loaded, mesh, each=rest))


def _first_state(
    cfg: Config, mesh: Mesh, model: type[Transformer], abstract: TrainState
) -> tuple[TrainState, int, list[str]]:
    """Create a new state without frozen arrays; return it, step 0, and lines to print about it."""
    notes = [f"parameters of {cfg.train.init_from}"] if cfg.train.init_from else []
    if not cfg.train.init_from or cfg.train.lora.enabled:
        return init_state(cfg, mesh, model, frozen=False), 0, notes
    params = initial_params(cfg, abstract.params, mesh)

    def begin(params):
        return fresh_state(cfg, params).without_frozen()

    return jax.jit(begin, donate_argnums=0)(params), 0, notes
