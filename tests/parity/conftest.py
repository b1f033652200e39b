"""Fixtures of this folder's tables: a run on its mesh must equal the same run on one device."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.pairs import write_pairs
from tests.states import some_state
from ultrascale_jax.config import Config, ContextConfig, MeshConfig, PipelineConfig
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.forward_steps import make_eval_step, make_pair_step
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.step import apply_gradients, gradients, position_weight
from ultrascale_jax.training.setup import make_loader

TOLERANCE = 1e-5
BOUND = 8.0
"""Times the balanced rows is room for all tokens at one of 8 experts: no second round."""


@pytest.fixture(autouse=True)
def forget_programs():
    """Each row's program is large and used once; a process that keeps all runs out of memory maps and crashes."""
    yield
    jax.clear_caches()


class Outcome(NamedTuple):
    """Losses of all steps, the model's and each of its `mtp_layers`; gradients of the first by name in canonical order,
    and the evaluation at the end, if any."""

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


def run(cfg: Config, evaluates: bool, start: Callable) -> Outcome:
    """Train `cfg`, which is checked, from `start(cfg, mesh)` on the first devices; evaluate at the end if told to."""
    mesh = make_mesh(cfg.mesh, jax.devices()[: math.prod(cfg.mesh.sizes.values())])
    loader = make_loader(cfg)

    @jax.jit
    def step(state, batch):
        weight = position_weight(state, batch)
        found = gradients(cfg, state.params, batch, weight, state.frozen)
        return apply_gradients(cfg, state, batch, *found), found

    losses, first = [], {}
    with jax.set_mesh(mesh):
        state = start(cfg, mesh)
        sharding = NamedSharding(mesh, act("BT"))
        for i in range(cfg.train.steps):
            batch = loader.batch(i)
            batch = jax.device_put(masked(batch) if cfg.model.experts else batch, sharding)
            (state, metrics), found = step(state, batch)
            losses.append([metrics["loss"], *metrics.get("mtp_loss", ())])
            if i == 0:
                first = by_name(*found)
        evaluation = None
        if evaluates and cfg.train.dpo.enabled:
            sums = make_pair_step(cfg)(state, batch)
            evaluation = float(sums["loss"]) / int(sums["pairs"])
        elif evaluates:
            nats, tokens = make_eval_step(cfg)(state.model, batch)
            evaluation = float(nats) / int(tokens)
    return Outcome(losses, first, evaluation)


@functools.cache
def run_alone(cfg: Config, evaluates: bool, start: Callable) -> Outcome:
    return run(cfg, evaluates, start)


def compare(cfg: Config, evaluates: bool = True, start: Callable = some_state) -> None:
    """Refuse a config whose losses, gradients or evaluation are not those of one device, to 1e-5 in float32.

    That device has no accumulation, no sharding, no recomputation, the natural order of tokens and room for every
    choice of experts; it trains each model and data once.
    """
    alone = dataclasses.replace(
        cfg,
        mesh=MeshConfig(fsdp=1),
        pp=PipelineConfig(),
        cp=ContextConfig(),
        moe=dataclasses.replace(
            cfg.moe, dispatch="dropless", capacity_factor=BOUND, a2a_groups=1, overlap=False
        ),
        train=dataclasses.replace(cfg.train, microbatches=1, zero=0, remat="none"),
    )
    outcome, expected = run(cfg, evaluates, start), run_alone(alone, evaluates, start)
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=TOLERANCE)
    if evaluates:
        np.testing.assert_allclose(outcome.evaluation, expected.evaluation, rtol=TOLERANCE)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for path, gradient in expected.gradients.items():
        largest = np.abs(gradient).max() or 1.0  # the bias of experts has no gradient
        error = np.abs(outcome.gradients[path] - gradient).max() / largest
        assert error < TOLERANCE, f"{path}: relative error {error:.1e}"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """The `data.source` of preference pairs."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def assert_equals_one_device():
    return compare
