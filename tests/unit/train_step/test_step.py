"""The optimizer step: what it must not change, what it keeps, where it puts things."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.faults.tiny import MODEL
from tests.runs import bits, change, mesh_of
from tests.states import some_state
from ultrascale_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.kernels.xla import known_options
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step import loss_scale
from ultrascale_jax.train_step.forward_steps import make_eval_step
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.optim import optimizer, rate_change, schedule
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.train_step.step import (
    apply_gradients,
    compiled,
    gradients,
    make_train_step,
    train_step,
)

CFG = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=2, sp=2),
    data=DataConfig(source="synthetic", seq_len=32),
    optim=OptimConfig(lr=1e-2),
    train=TrainConfig(steps=10, global_batch=8, precision="fp32"),
)


def variant(**sections):
    return change(CFG, **sections)


def test_a_batch_with_an_id_outside_the_vocabulary_has_no_loss_and_changes_nothing():
    cfg = variant(train={"microbatches": 2})
    mesh = mesh_of(cfg)
    good = Loader(cfg.data, vocab_size=64, global_batch=8, seed=0).batch(0)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        step = jax.jit(functools.partial(train_step, cfg))
        evaluate = make_eval_step(cfg)
        for name, value in (("tokens", 64), ("tokens", -1), ("targets", 10**6), ("targets", -2)):
            bad = good[name].copy()
            bad[-1, 3] = value
            batch = jax.device_put(good | {name: bad}, NamedSharding(mesh, act("BT")))
            after, metrics = step(state, batch)
            assert bool(metrics["skipped"]) and np.isnan(metrics["loss"]), (name, value)
            kept, before = ((s.params, s.opt_state) for s in (after, state))
            assert bits(kept) == bits(before), (name, value)
            assert np.isnan(evaluate(state.params, batch)[0]), (name, value)


# Without ZeRO the width need not divide.
UNDIVIDED = variant(
    model={"d_model": 33},
    mesh={"fsdp": 4, "sp": 1},
    train={"zero": 0, "microbatches": 2, "z_loss": 0.1},
)


@pytest.fixture(scope="module")
def undivided():
    """The state before eight steps, that after them, and the metrics of each."""
    cfg, metrics = UNDIVIDED, []
    mesh = mesh_of(cfg)
    loader = Loader(cfg.data, vocab_size=64, global_batch=8, seed=0)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        before, step = jax.tree.map(np.asarray, state), make_train_step(cfg)
        for i in range(8):
            state, m = step(state, jax.device_put(loader.batch(i), NamedSharding(mesh, act("BT"))))
            metrics.append(jax.tree.map(np.asarray, m))
    return before, state, metrics


def test_good_steps_change_every_parameter_and_keep_types_and_shardings(undivided):
    before, after, metrics = undivided
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        assert np.abs(old - np.asarray(new)).max() > 0
    assert (int(after.step), int(after.skipped_in_a_row)) == (8, 0)
    assert not any(m["skipped"] for m in metrics) and metrics[-1]["loss"] < metrics[0]["loss"]
    assert after.params.embed.get_value().sharding.shard_shape((64, 33)) == (64, 33)
    expected = abstract_state(UNDIVIDED, mesh_of(UNDIVIDED))
    for leaf, want in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_zero_shards_what_rests_on_a_device(zero, parts):
    cfg = variant(train={"zero": zero}, mesh={"fsdp": 2, "sp": 1, "dp": 2})
    state = abstract_state(cfg, mesh_of(cfg))
    w_up = state.params.stacks[0].mlp.w_up.get_value()
    assert w_up.sharding.shard_shape(w_up.shape) == (1, 32 // parts, 64)


@pytest.mark.parametrize(("precision", "zero"), [("bf16", 1), ("bf16", 3), ("fp32", 3)])
def test_master_weights_moments_and_gradients_are_float32(precision, zero):
    cfg = variant(train={"precision": precision, "zero": zero})
    mesh = mesh_of(CFG)
    state, place = abstract_state(cfg, mesh), NamedSharding(mesh, act("BT"))
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for name, x in Loader(CFG.data, vocab_size=64, global_batch=8, seed=0).batch(0).items()
    }
    with jax.set_mesh(mesh):
        step = functools.partial(gradients, cfg)
        grads, sums = jax.eval_shape(step, state.params, batch, jnp.float32(1.0))
    leaves = jax.tree.leaves((state.params, state.opt_state, grads, sums))
    assert {x.dtype for x in leaves if x.dtype != jnp.int32} == {jnp.dtype(jnp.float32)}


def test_muon_moves_matrices_of_blocks_as_far_as_adamw_does():
    """By 0.2 of the rate in the mean square, each layer on its own (arXiv 2502.16982, section 2.2)."""
    cfg = variant(
        optim={"name": "muon", "weight_decay": 0.0, "schedule": "constant"},
        mesh={"fsdp": 1, "sp": 1},
        model={"num_layers": 2},
    )
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        params = some_state(cfg, mesh).params
        rng = np.random.default_rng(0)
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        # A layer whose gradients are small is moved as far as the other.
        for layers in jax.tree.leaves(grads.stacks):
            layers[1] *= 1e-3
        muon = optimizer(cfg)
        updates, _ = jax.jit(muon.update)(grads, muon.init(params), params)
    attn, mlp = updates.stacks[0].attn, updates.stacks[0].mlp
    for update in (attn.w_q, attn.w_k, attn.w_o, mlp.w_up, mlp.w_down):
        for layer in np.asarray(update.get_value()):
            # Newton-Schulz leaves singular values between 0.7 and 1.2.
            np.testing.assert_allclose(np.sqrt(np.mean(np.square(layer))), 0.2 * 1e-2, rtol=0.25)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_evaluation_sums_what_training_averages(undivided, microbatches):
    before, _, metrics = undivided
    loader = Loader(CFG.data, vocab_size=64, global_batch=8, seed=0)
    mesh = mesh_of(UNDIVIDED)
    cfg = dataclasses.replace(
        UNDIVIDED, train=dataclasses.replace(UNDIVIDED.train, microbatches=microbatches)
    )
    with jax.set_mesh(mesh):
        params = some_state(UNDIVIDED, mesh).params
        assert bits(params) == bits(before.params)
        nats, count = make_eval_step(cfg)(
            params, jax.device_put(loader.batch(0), NamedSharding(mesh, act("BT")))
        )
    np.testing.assert_allclose(nats / count, metrics[0]["loss"], rtol=1e-6)
    assert int(count) == int((loader.batch(0)["targets"] >= 0).sum()) == int(metrics[0]["tokens"])


@pytest.mark.parametrize(("clip_norm", "precision"), [(0.0, "fp32"), (1.0, "fp16")])
def test_an_update_is_adamw_of_the_clipped_gradients_at_the_rate_that_is_logged(
    clip_norm, precision
):
    """Against float64, with a norm below `clip_norm` and one above, after two good steps of five."""
    optim = {"clip_norm": clip_norm, "warmup_steps": 4, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    cfg = variant(optim=optim, mesh={"fsdp": 1, "sp": 1}, train={"precision": precision})
    scale = loss_scale.FIRST if precision == "fp16" else 1.0
    rng = np.random.default_rng(0)
    targets = np.where(np.arange(32) % 4, 1, -1)[None].astype(np.int32).repeat(8, 0)

    def like(tree, size=1.0):
        return jax.tree.map(lambda x: size * rng.random(x.shape, np.float32), tree)

    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        adam, *others = jax.tree.map(
            lambda x: x + 2 if x.dtype == jnp.int32 else x, state.opt_state
        )
        adam = adam._replace(mu=like(adam.mu, 1e-3), nu=like(adam.nu, 1e-5))
        counts = {"step": 5, "skipped": 3, "skipped_in_a_row": 2}
        counts = {name: jnp.int32(value) for name, value in counts.items()}
        state = dataclasses.replace(state, opt_state=(adam, *others), **counts)
        step = jax.jit(functools.partial(apply_gradients, cfg))
        for norm in (0.5, 3.0):
            grads = like(state.params)
            length = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
            # A quarter of the positions has no target: a sum over the others is divided by their number.
            grads = jax.tree.map(lambda g, by=0.75 * norm / length: g * by, grads)
            scaled = jax.tree.map(lambda g: scale * g, (grads, Sums(jnp.float32(1.0))))
            after, metrics = step(state, {"targets": targets}, *scaled)
            assert [int(getattr(after, name)) for name in counts] == [6, 3, 0]
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
            np.testing.assert_allclose(metrics["loss"], 1 / 0.75, rtol=1e-6)
            np.testing.assert_allclose(metrics["lr"], 1e-2 * 3 / 4, rtol=1e-6)
            share = min(1.0, clip_norm / norm) / 0.75 if clip_norm else 1 / 0.75
            trees = state.params, grads, adam.mu, adam.nu, after.params
            paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(grads)]
            for path, *arrays in zip(paths, *map(jax.tree.leaves, trees), strict=True):
                p, g, mu, nu, found = (np.float64(a) for a in arrays)
                mu = (0.8 * mu + 0.2 * share * g) / (1 - 0.8**3)
                nu = (0.95 * nu + 0.05 * (share * g) ** 2) / (1 - 0.95**3)
                wanted = -0.0075 * (
                    mu / (np.sqrt(nu) + cfg.optim.eps) + 0.1 * p * ("norm" not in path)
                )
                np.testing.assert_allclose(found - p, wanted, rtol=2e-6, atol=2e-7, err_msg=path)


@pytest.mark.parametrize(
    ("fields", "points"),
    [
        (
            {"schedule": "cosine", "warmup_steps": 10},
            {0: 0.1, 4: 0.5, 9: 1.0, 54: 0.55, 99: 0.1},
        ),
        (
            {"schedule": "wsd", "decay_steps": 20, "warmup_steps": 10},
            {9: 1.0, 10: 1.0, 79: 1.0, 89: 0.55, 99: 0.1},
        ),
        ({"schedule": "wsd"}, {0: 1.0, 79: 1.0, 99: 0.1}),
        ({"schedule": "wsd", "decay_steps": 200, "warmup_steps": 10}, {9: 1.0, 54: 0.55, 99: 0.1}),
        ({"schedule": "cosine", "warmup_steps": 200}, {0: 0.005, 99: 0.5, 199: 1.0}),
        ({"schedule": "constant", "warmup_steps": 4}, {1: 0.5, 99: 1.0}),
        ({"schedule": "constant", "warmup_steps": 1}, {0: 1.0, 1: 1.0}),
    ],
)
def test_the_schedule_passes_through_its_points(fields, points):
    cfg = variant(optim={"lr": 0.2, **fields}, train={"steps": 100})
    for step, share in points.items():
        np.testing.assert_allclose(schedule(cfg)(step), 0.2 * share, atol=1e-7)


def test_a_resumed_run_of_other_steps_or_settings_tells_its_rate():
    fields = {"lr": 0.2, "schedule": "wsd", "decay_steps": 2, "min_lr_ratio": 0.25}
    saved, longer = (variant(optim=fields, train={"steps": steps}) for steps in (4, 12))
    [line] = rate_change(saved, longer, 4)
    wanted = "update 5: 2.00e-01, by the saved settings 5.00e-02; of the last, 12: 5.00e-02"
    assert line == f"learning rate of {wanted}"
    [line] = rate_change(longer, variant(optim=fields | {"lr": 0.1}, train={"steps": 12}), 4)
    assert "update 5: 1.00e-01, by the saved settings 2.00e-01" in line
    assert rate_change(saved, saved, 2) == rate_change(saved, longer, 0) == []
    assert rate_change(longer, saved, 4) == []


def test_an_option_that_xla_lacks_is_left_out_with_a_warning(monkeypatch):
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_of_tomorrow": 3}
    lowering = Lowering(xla=tuple(options.items()))
    monkeypatch.setattr(Lowering, "of", lambda cfg: lowering)
    with pytest.warns(UserWarning, match="without an option.*'xla_gpu_of_tomorrow'"):
        function = compiled(Config(), lambda x: x + 1)
    assert function(1) == 2
    with pytest.warns(UserWarning):
        assert known_options(options) == {"xla_gpu_enable_triton_gemm": False}
