"""Compare a run on its mesh with the same run on one device: losses, gradients, evaluation."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.parity.rows import IN_SEGMENTS, NIGHTLY_ROWS, ROWS, Row
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import FP8, Config, ContextConfig, MeshConfig, PipelineConfig
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.pipeline import segments
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step import precision
from ultrascale_jax.train_step.forward_steps import make_eval_step, make_pair_step
from ultrascale_jax.train_step.objective import Sums, count_terms
from ultrascale_jax.train_step.step import apply_gradients, gradients, position_weight
from ultrascale_jax.training.setup import make_loader

TOLERANCE = 1e-5
SEEDS = 0, 1
"""Added to `train.seed`: each row is compared with these weights and data."""

SHARE_OF_NOISE = {"bf16": 4.0} | dict.fromkeys(FP8, 1.5)
"""How far from one device a mesh may be, in the distance of that device from float32.

In bf16 both round as often, in another order, and routers choose others where scores nearly tie. In fp8 all else is
float32 and the same values are quantised, but another order of a sum may turn one to its neighbour, and that one many
in the layers behind it: at most both have the whole rounding of fp8, in different places."""


UNIT = 2**-7
"""Distance between numbers of bf16 near 1: one device's distance from float32 may be less by chance."""


class Outcome(NamedTuple):
    """Losses of all steps, the model's and each of its `mtp_layers`, and its terms; gradients of the first by name in
    canonical order, and the evaluation at the end, if any."""

    losses: list[list]
    gradients: dict[str, np.ndarray]
    evaluation: float | None


def by_name(grads: Transformer, sums: Sums) -> dict[str, np.ndarray]:
    """Each gradient, and what the routers did, their layers as the model runs them, and those of `mtp_layers` last."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if sums.routed is not None:
        modules = grads.cfg.mtp_layers
        rows = len(sums.routed) - modules
        if len(grads.stacks) == 1 or not grads.cfg.pattern:
            by_row = sums.routed[:rows].reshape(len(grads.orders[-1]), -1, sums.routed.shape[1])
            named[f"stacks.{len(grads.stacks) - 1}.moe.statistics"] = by_row
        else:
            named["statistics"] = sums.routed
        named |= {"mtp.statistics": sums.routed[rows:]} if modules else {}
    canonical = {}
    for name, leaf in named.items():
        value = np.asarray(leaf)
        if name.startswith("stacks."):
            order = grads.orders[int(name.split(".")[1])]
            value = value[[order.index(i) for i in sorted(set(order) - {None})]]
        if name in ("embed.value", "head.value"):
            value, padding = np.split(value, [grads.cfg.vocab_size], axis=name == "head.value")
            assert not padding.any()
        canonical[name] = value
    return canonical


def masked(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Leave few targets, unequal numbers in different rows, and so in different micro-batches and on devices."""
    every = 1 + np.arange(len(batch["tokens"]))[:, None]
    return batch | {"targets": np.where(batch["tokens"] % every == 0, batch["targets"], -1)}


@contextlib.contextmanager
def fp8_alone_rounds() -> Iterator[None]:
    """Make float32 the type of compute around products in fp8."""
    with pytest.MonkeyPatch.context() as patch:
        for name in FP8:
            patch.setitem(precision.COMPUTE, name, jnp.float32)
        yield


MOST_SEGMENTS = segments.MOST_SEGMENTS


@contextlib.contextmanager
def loops(most: int = 0) -> Iterator[None]:
    """Run a pipeline in at most `most` loops, or one; one compiles in half of the time of the trainer's up to eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MOST_SEGMENTS", most)
        yield


def run(
    cfg: Config,
    evaluates: bool,
    start: Callable,
    seeds: tuple[int, ...] = SEEDS,
    in_segments: bool = False,
) -> list[Outcome]:
    """Train `cfg`, which is checked, from `start(cfg, mesh)` on the first devices, once for each of `seeds`.

    The seeds share one program. A run of one step has no update; `evaluates` adds an evaluation at the end. A pipeline
    is one loop, unless it runs `in_segments` as the trainer's.
    """
    mesh = make_mesh(cfg.mesh, jax.devices()[: math.prod(cfg.mesh.sizes.values())])

    @jax.jit
    def step(state, batch):
        weight = position_weight(state, batch)
        models = state.params, batch, weight, state.frozen, state.reference
        grads, sums = gradients(cfg, *models)
        if cfg.train.steps == 1:
            return (state, {"loss": mean_loss(cfg, batch, sums)}), (grads, sums)
        return apply_gradients(cfg, state, batch, grads, sums), (grads, sums)

    try:
        most = MOST_SEGMENTS if in_segments else 0
        with fp8_alone_rounds(), loops(most), jax.set_mesh(mesh):
            return [
                run_seed(change(cfg, train={"seed": cfg.train.seed + seed}), step, evaluates, start)
                for seed in seeds
            ]
    finally:
        # Each program is large and used once; a process that keeps all runs out of memory maps and crashes.
        jax.clear_caches()


def mean_loss(cfg: Config, batch: dict[str, jax.Array], sums: Sums) -> jax.Array:
    return sums.loss * batch["targets"].size / count_terms(cfg, batch)


def run_seed(cfg: Config, step: Callable, evaluates: bool, start: Callable) -> Outcome:
    mesh = jax.sharding.get_mesh()
    loader, sharding = make_loader(cfg), NamedSharding(mesh, act("BT"))
    state, losses, first, evaluation = start(cfg, mesh), [], {}, None
    for i in range(cfg.train.steps):
        batch = loader.batch(i)
        batch = jax.device_put(masked(batch) if cfg.model.experts else batch, sharding)
        (state, metrics), grads_and_sums = step(state, batch)
        terms = [metrics[name] for name in (*state.params.loss_terms, *state.params.layer_terms)]
        losses.append([metrics["loss"], *metrics.get("mtp_loss", ()), *terms])
        first = first or by_name(*grads_and_sums)
    if evaluates and cfg.train.dpo.enabled:
        sums = make_pair_step(cfg)(state, batch)
        evaluation = float(sums["loss"]) / int(sums["pairs"])
    elif evaluates:
        nats, tokens = make_eval_step(cfg)(state.model, batch)
        evaluation = float(nats) / int(tokens)
    return Outcome(losses, first, evaluation)


@functools.cache
def run_alone(cfg: Config, *settings: Any) -> list[Outcome]:
    return run(cfg, *settings)


def on_one_device(cfg: Config) -> Config:
    """Return the reference of a run: no accumulation, sharding, recomputation or rule of lowering, tokens in order."""
    train = {"microbatches": 1, "zero": 0, "remat": "none", "lowering": "plain"}
    cfg = change(cfg, moe={"a2a_groups": 1, "folding": False}, train=train)
    return dataclasses.replace(
        cfg, mesh=MeshConfig(fsdp=1), pp=PipelineConfig(), cp=ContextConfig()
    )


def compare(
    cfg: Config,
    evaluates: bool = False,
    start: Callable = some_state,
    seeds: tuple[int, ...] = SEEDS,
) -> None:
    """Refuse a config whose losses, gradients or evaluation are not those of one device, to 1e-5 in float32 and fp8.

    That device trains each model and data once a session.
    """
    settings = evaluates, start, seeds
    outcomes, expected = run(cfg, *settings), run_alone(on_one_device(cfg), *settings)
    for seed, outcome, alone in zip(seeds, outcomes, expected, strict=True):
        assert_close(outcome, alone, f"seed {seed}")


def assert_close(outcome: Outcome, expected: Outcome, seed: str) -> None:
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=TOLERANCE, err_msg=seed)
    if expected.evaluation is not None:
        np.testing.assert_allclose(outcome.evaluation, expected.evaluation, rtol=TOLERANCE)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for path, gradient in expected.gradients.items():
        largest = np.abs(gradient).max() or 1.0  # the bias of experts has no gradient
        error = np.abs(outcome.gradients[path] - gradient).max() / largest
        assert error < TOLERANCE, f"{seed}, {path}: relative error {error:.1e}"


UPDATED = "sinks", "latent"
"""Models whose rows without a pipeline take a second step, after an update: dense layers, experts, and adapters, in
each stage of ZeRO. An update is the same for every kind of layer."""


def num_steps(row: Row) -> int:
    """Return the steps of a row: in float32 without a pipeline two, if its model is one of `UPDATED`."""
    updates = row.precision == "fp32" and row.config.mesh.pp == 1 and row.model in UPDATED
    return 2 if updates else 1


def train_reference(row: Row, precision: str) -> list[Outcome]:
    """Train the model and data of a row on one device; in float32 as many steps as any row of them takes."""
    rows = ROWS if row in ROWS else NIGHTLY_ROWS
    alike = [other for other in rows if (other.model, other.lora) == (row.model, row.lora)]
    steps = max(map(num_steps, alike), default=1) if precision == "fp32" else 1
    cfg = change(on_one_device(row.config), train={"precision": precision, "steps": steps})
    return run_alone(cfg, False, some_state, SEEDS)


def references(rows: Iterable[Row]) -> dict[str, tuple[Row, str]]:
    """Return by name a row and the precision of each one-device run that rows are compared with."""
    return {
        f"{row.model}-{precision}{'-lora' if row.lora else ''}": (row, precision)
        for row in rows
        for precision in ("fp32", row.precision)
    }


def make_tests(rows: Iterable[Row]) -> tuple[Callable, Callable]:
    """Return two tests for a file, whose worker trains each model on one device once: of that run, and of each row."""
    alone = references(rows := list(rows))

    @pytest.mark.parametrize("name", alone)
    def test_one_device_trains_the_model(name):
        for outcome in train_reference(*alone[name]):
            assert np.all(np.isfinite(outcome.losses))

    @pytest.mark.parametrize("row", rows, ids=lambda row: row.name)
    def test_row_equals_one_device(row):
        compare_row(row)

    return test_one_device_trains_the_model, test_row_equals_one_device


def compare_row(row: Row) -> None:
    """Compare losses and gradients of the first step, and losses of the second, if any.

    A row in bf16 or fp8 has the bounds of `assert_within_noise`.
    """
    steps = num_steps(row)
    cfg = change(row.config, train={"steps": steps})
    outcomes = run(cfg, False, some_state, in_segments=row in IN_SEGMENTS)
    expected, in_float32 = (train_reference(row, name) for name in (row.precision, "fp32"))
    for seed, outcome, alone, noiseless in zip(SEEDS, outcomes, expected, in_float32, strict=True):
        alone = alone._replace(losses=alone.losses[:steps])
        if row.precision == "fp32":
            assert_close(outcome, alone, f"seed {seed}")
        else:
            assert_within_noise(row.precision, outcome, alone, noiseless, f"seed {seed}")


def assert_within_noise(
    name: str, outcome: Outcome, expected: Outcome, exact: Outcome, seed: str
) -> None:
    """Refuse numbers further from one device's than `SHARE_OF_NOISE` of that device's distance from float32."""
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=UNIT / 2, err_msg=seed)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for path, gradient in expected.gradients.items():
        error = np.linalg.norm(outcome.gradients[path] - gradient)
        noise = np.linalg.norm(gradient - exact.gradients[path])
        noise = max(noise, UNIT * np.linalg.norm(gradient))
        assert error <= SHARE_OF_NOISE[name] * noise, (
            f"{seed}, {path}: {error / noise:.1e} of noise"
        )
