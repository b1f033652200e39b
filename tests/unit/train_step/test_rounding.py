"""Stochastic rounding: right on average, the same on every mesh and after a resume, and it keeps small steps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.checkpoints import save
from tests.faults.tiny import config as TINY
from tests.runs import change, in_folder, mesh_of, saved_state
from tests.states import some_state
from ultrascale_jax.checkpoint.mesh_independent import to_checkpoint_layout
from ultrascale_jax.config import (
    MeshConfig,
    PipelineConfig,
)
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.rounding import (
    add_updates,
    in_bfloat16,
    random_bits,
    round_stochastically,
)
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.train_step.step import apply_gradients

CFG = change(
    TINY,
    mesh={"fsdp": 1},
    model={"num_layers": 5},
    optim={"moment_dtype": "bfloat16", "stochastic_rounding": True},
)


def on(mesh, pp=None, microbatches=1):
    train = dataclasses.replace(CFG.train, microbatches=microbatches)
    mesh = MeshConfig.of(**mesh)
    return dataclasses.replace(CFG, mesh=mesh, pp=pp or PipelineConfig(), train=train)


def test_over_all_bits_the_mean_is_the_number_and_each_result_a_neighbour():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.normal(size=6), [1e-30, -3e30, 1.0, 0.0, 1e-41, 2.0 + 2**-22], [-1.7]]
    ).astype(np.float32)
    bits = jnp.arange(2**16, dtype=jnp.uint32)[:, None] + jnp.uint32(5 << 16)
    shape = (len(bits), len(x))
    rounded = round_stochastically(jnp.broadcast_to(x, shape), jnp.broadcast_to(bits, shape))
    assert rounded.dtype == jnp.bfloat16
    found = np.asarray(rounded, np.float64)
    np.testing.assert_allclose(found.mean(0), x, rtol=1e-12)
    for value, column in zip(x, found.T, strict=True):
        exact = value == np.float32(jnp.bfloat16(value))
        assert len(np.unique(column)) == (1 if exact else 2)
        assert np.all(np.abs(column - value) < max(np.abs(value) * 2**-7, 2.0**-133))


FSDP_TP = on({"fsdp": 2, "tp": 2})
INTERLEAVED = on({"pp": 2, "fsdp": 2}, PipelineConfig(schedule="interleaved"), microbatches=4)


def bits_of(cfg):
    """Return random bits of all parameters, and sums that others round, in a checkpoint's order; and the program."""
    mesh = mesh_of(cfg)

    @jax.jit
    def make(params):
        rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return random_bits(jax.random.key(7), params), add_updates(rounded, params, 7, jnp.int32(1))

    with jax.set_mesh(mesh):
        params = some_state(cfg, mesh).params
        program = make.lower(params).compile()
        bits, sums = program(params)
        for x, like in zip(jax.tree.leaves(bits), jax.tree.leaves(params), strict=True):
            assert x.dtype == jnp.uint32 and x.sharding.is_equivalent_to(like.sharding, x.ndim)
        ordered = [jax.tree.leaves(to_checkpoint_layout(tree)) for tree in (bits, sums)]
    return *([np.asarray(x) for x in leaves] for leaves in ordered), program.as_text()


@pytest.fixture(scope="module")
def alone():
    return bits_of(CFG)


def test_the_bits_depend_on_the_layer_and_not_on_the_mesh_and_nothing_travels(alone):
    *found, text = bits_of(INTERLEAVED)
    for arrays, expected in zip(found, alone[:2], strict=True):
        assert [x.tobytes() for x in arrays] == [x.tobytes() for x in expected]
    assert not re.search(r"(all|reduce|collective)-\w+(-start)?\(", text)


def test_layers_steps_and_parameters_have_bits_of_their_own(alone):
    bits, _, _ = alone
    stacks = [x for x in bits if x.ndim > 1 and x.shape[0] == 5]
    rows = [row.tobytes() for x in stacks for row in x]
    assert len(set(rows)) == len(rows)
    halves = np.concatenate([x.ravel() for x in bits])
    for half in (halves & 0xFFFF, halves >> 16):
        assert abs(half.mean() / 2**16 - 0.5) < 5 * (12 * half.size) ** -0.5


@pytest.fixture(scope="module")
def trained():
    """The program of an update on four devices, the state after two of them, and the gradients of all."""
    cfg = FSDP_TP
    mesh = mesh_of(cfg)
    batch = {"targets": jnp.zeros((8, 32), jnp.int32)}
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        grads = state.params
        step = jax.jit(lambda state, g: apply_gradients(cfg, state, batch, g, Sums(jnp.float32(1))))
        for _ in range(2):
            state, _ = step(state, grads)
        return cfg, step, state, grads


def test_both_moments_are_bfloat16_and_a_resumed_run_continues_bit_for_bit(trained, tmp_path):
    cfg, step, state, grads = trained
    cfg = in_folder(cfg, tmp_path)
    moments = state.opt_state[0]
    kinds = {x.dtype for x in jax.tree.leaves((moments.mu, moments.nu))}
    assert kinds == {jnp.dtype(jnp.bfloat16)}
    save(cfg, state, 2)
    resumed = saved_state(cfg, tmp_path, 2)
    with jax.set_mesh(mesh_of(cfg)):
        results = [step(s, grads) for s in (state, resumed)]
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_moments_round_another_way_at_another_seed_or_step_only():
    adam = in_bfloat16(optax.scale_by_adam(), seed=0), in_bfloat16(optax.scale_by_adam(), seed=1)
    with jax.set_mesh(mesh_of(CFG)):
        params = grads = {"w": jnp.linspace(-1.0, 1.0, 100)}
        start = adam[0].init(params)
        later = start._replace(count=start.count + 1)
        updates = [jax.jit(a.update) for a in adam]
        pairs = (updates[0], start), (updates[0], start), (updates[0], later), (updates[1], start)
        first, same, step, seed = (
            np.asarray(run(grads, s, params)[1].mu["w"]).tobytes() for run, s in pairs
        )
    assert first == same and len({first, step, seed}) == 3


def test_matrices_of_layers_alone_rest_in_bfloat16():
    cfg = change(CFG, optim={"weight_dtype": "bfloat16"})
    params = abstract_state(cfg, mesh_of(cfg)).params
    [stack] = params.stacks
    matrices, others = (stack.attn, stack.mlp), (params.embed, params.head, params.final_norm)
    for parts, dtype in ((matrices, jnp.bfloat16), ((*others, stack.mlp_norm), jnp.float32)):
        assert {x.dtype for x in jax.tree.leaves(parts)} == {jnp.dtype(dtype)}


def test_updates_too_small_for_bfloat16_add_up():
    """Each step takes 1e-4 off 1, a hundredth of the distance between two bfloat16 numbers there."""
    with jax.set_mesh(mesh_of(CFG)):
        start = {"w": jnp.ones((4096,), jnp.bfloat16)}
        updates = {"w": jnp.full((4096,), -1e-4)}

        def step(params, number):
            return add_updates(params, updates, 0, number), None

        end, _ = jax.jit(lambda p: jax.lax.scan(step, p, jnp.arange(200)))(start)
    assert abs(np.asarray(end["w"], np.float64).mean() - 0.98) < 5e-4
