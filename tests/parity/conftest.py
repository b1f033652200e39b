"""Compare a run on its mesh with the same run on one device: losses, gradients, evaluation."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.pairs import write_pairs
from tests.parity.rows import Row
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import Config, ContextConfig, MeshConfig, PipelineConfig
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.forward_steps import make_eval_step, make_pair_step
from ultrascale_jax.train_step.objective import Sums, count_terms
from ultrascale_jax.train_step.step import apply_gradients, gradients, position_weight
from ultrascale_jax.training.setup import make_loader

TOLERANCE = 1e-5
SEEDS = 0, 1
"""Added to `train.seed`: each row is compared with these weights and data."""


@pytest.fixture(autouse=True)
def forget_programs():
    """Each row's program is large and used once; a process that keeps all runs out of memory maps and crashes."""
    yield
    jax.clear_caches()


class Outcome(NamedTuple):
    """Losses of all steps, the model's and each of its `mtp_layers`, and its terms; gradients of the first by name in
    canonical order, and the evaluation at the end, if any."""

    losses: list[list]
    gradients: dict[str, np.ndarray]
    evaluation: float | None


def by_name(grads: Transformer, sums: Sums) -> dict[str, np.ndarray]:
    """Each gradient, and what the routers did, their layers as the model runs them, and those of `mtp_layers` last."""
    found = {}
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if sums.routed is not None:
        modules = grads.cfg.mtp_layers
        rows = len(sums.routed) - modules
        named[f"stacks.{len(grads.stacks) - 1}.moe.statistics"] = sums.routed[:rows]
        named |= {"mtp.statistics": sums.routed[rows:]} if modules else {}
    for name, leaf in named.items():
        value = np.asarray(leaf)
        if name.startswith("stacks."):
            order = grads.orders[int(name.split(".")[1])]
            value = value[[order.index(i) for i in sorted(set(order) - {None})]]
        found[name] = value
    return found


def masked(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Leave few targets, unequal numbers in different rows, and so in different micro-batches and on devices."""
    every = 1 + np.arange(len(batch["tokens"]))[:, None]
    return batch | {"targets": np.where(batch["tokens"] % every == 0, batch["targets"], -1)}


def run(
    cfg: Config, evaluates: bool, start: Callable, seeds: tuple[int, ...] = SEEDS
) -> list[Outcome]:
    """Train `cfg`, which is checked, from `start(cfg, mesh)` on the first devices, once for each of `seeds`.

    The seeds share one program. A run of one step has no update; `evaluates` adds an evaluation at the end.
    """
    mesh = make_mesh(cfg.mesh, jax.devices()[: math.prod(cfg.mesh.sizes.values())])

    @jax.jit
    def step(state, batch):
        weight = position_weight(state, batch)
        found = gradients(cfg, state.params, batch, weight, state.frozen)
        if cfg.train.steps == 1:
            return (state, {"loss": mean_loss(cfg, batch, found[1])}), found
        return apply_gradients(cfg, state, batch, *found), found

    with jax.set_mesh(mesh):
        return [
            run_seed(change(cfg, train={"seed": cfg.train.seed + seed}), step, evaluates, start)
            for seed in seeds
        ]


def mean_loss(cfg: Config, batch: dict[str, jax.Array], sums: Sums) -> jax.Array:
    return sums.loss * batch["targets"].size / count_terms(cfg, batch)


def run_seed(cfg: Config, step: Callable, evaluates: bool, start: Callable) -> Outcome:
    mesh = jax.sharding.get_mesh()
    loader, sharding = make_loader(cfg), NamedSharding(mesh, act("BT"))
    state, losses, first, evaluation = start(cfg, mesh), [], {}, None
    for i in range(cfg.train.steps):
        batch = loader.batch(i)
        batch = jax.device_put(masked(batch) if cfg.model.experts else batch, sharding)
        (state, metrics), found = step(state, batch)
        terms = [metrics[name] for name in (*state.params.loss_terms, *state.params.layer_terms)]
        losses.append([metrics["loss"], *metrics.get("mtp_loss", ()), *terms])
        first = first or by_name(*found)
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


def compare(
    cfg: Config,
    evaluates: bool = False,
    start: Callable = some_state,
    seeds: tuple[int, ...] = SEEDS,
) -> None:
    """Refuse a config whose losses, gradients or evaluation are not those of one device, to 1e-5 in float32.

    That device has no accumulation, no sharding, no recomputation, no rule of lowering and the natural order of tokens;
    it trains each model and data once a session.
    """
    alone = dataclasses.replace(
        cfg,
        mesh=MeshConfig(fsdp=1),
        pp=PipelineConfig(),
        cp=ContextConfig(),
        moe=dataclasses.replace(cfg.moe, a2a_groups=1),
        train=dataclasses.replace(
            cfg.train, microbatches=1, zero=0, remat="none", lowering="plain"
        ),
    )
    settings = evaluates, start, seeds
    outcomes, expected = run(cfg, *settings), run_alone(alone, *settings)
    for seed, outcome, one_device in zip(seeds, outcomes, expected, strict=True):
        assert_close(outcome, one_device, f"seed {seed}")


def assert_close(outcome: Outcome, expected: Outcome, seed: str) -> None:
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=TOLERANCE, err_msg=seed)
    if expected.evaluation is not None:
        np.testing.assert_allclose(outcome.evaluation, expected.evaluation, rtol=TOLERANCE)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for path, gradient in expected.gradients.items():
        largest = np.abs(gradient).max() or 1.0  # the bias of experts has no gradient
        error = np.abs(outcome.gradients[path] - gradient).max() / largest
        assert error < TOLERANCE, f"{seed}, {path}: relative error {error:.1e}"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """The `data.source` of preference pairs."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def assert_equals_one_device():
    return compare


@pytest.fixture(scope="session")
def assert_row_equals_one_device():
    def check(row: Row) -> None:
        """Compare losses and gradients; without a pipeline also the second step, after an update."""
        cfg = row.config
        if cfg.mesh.pp > 1:
            cfg = change(cfg, train={"steps": 1})
        compare(cfg, row.evaluates)

    return check
