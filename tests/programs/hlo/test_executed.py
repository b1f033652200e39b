"""H100 programs of tiny runs, one for each kind of communication, executed from poisoned memory: one device's step."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.gpu_programs import FAST, NO_MACHINE_CODE
from tests.parity.comparison import on_one_device
from tests.runs import change
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.compile import Options
from ultrascale_jax.config import Config
from ultrascale_jax.hlo.interpreter import Interpreter, RaceError
from ultrascale_jax.plan.compiled.compile import (
    CompiledStep,
    compile_program,
    compile_step,
    target_devices,
)
from ultrascale_jax.plan.compiled.execute import Reference, Shards, execute_step, reference_step
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.sequence_order import sequence_order
from ultrascale_jax.train_step.state import abstract_batch, abstract_state

GPUS = 8
FLOAT32 = 1e-5
"""Largest relative difference of an output of a float32 step."""
TINY = "--model.num_layers 2 --data.seq_len 32 --data.no-document-mask --train.global_batch 8 --train.remat none"
DEBUG = f"debug {TINY}"
MOE = f"moe_debug {TINY} --model.num_layers 1 --model.experts.dense_layers 0"
ROOM = 8.0
"""Capacity factor with room for every token: no further rounds, which are the same program again in a loop."""
ONE_ROUND = f"--moe.capacity_factor {ROOM}"
RUNS = {
    "zero1 and allgather": (
        f"{DEBUG} --mesh dp=2,fsdp=2,cp=2 --train.zero 1 --cp.strategy allgather",
        {("all-reduce", "dp"), ("all-gather", "fsdp"), ("all-gather", "cp")},
    ),
    "zero2": (
        f"{DEBUG} --mesh dp=2,fsdp=2,tp=2 --train.zero 2 --train.microbatches 2",
        {("reduce-scatter", "fsdp"), ("all-reduce", "dp"), ("all-reduce", "tp")},
    ),
    "zero3": (f"{DEBUG} --mesh fsdp=8", {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}),
    "sp and tp": (
        f"{DEBUG} --mesh fsdp=2,sp=2,tp=2",
        {("all-gather", "sp"), ("all-reduce", "tp"), ("reduce-scatter", "fsdp")},
    ),
    "ring": (
        f"{DEBUG} --mesh cp=4,fsdp=2 --cp.strategy ring",
        {("collective-permute", "cp")},
    ),
    "pp and zigzag": (
        f"{DEBUG} --mesh pp=2,cp=2,fsdp=2 --train.microbatches 2",
        {("collective-permute", "pp"), ("collective-permute", "cp")},
    ),
    "zb_uniform and sp": (
        f"{DEBUG} --mesh pp=2,fsdp=2,sp=2 --train.microbatches 4 --pp.schedule zb_uniform",
        {("collective-permute", "pp"), ("reduce-scatter", "sp")},
    ),
    "ep": (f"{MOE} --mesh ep=4,fsdp=2", {("all-to-all", "ep"), ("all-gather", "fsdp")}),
    "ep and sp": (
        f"{MOE} --mesh ep=2,sp=2,fsdp=2 {ONE_ROUND}",
        {("all-to-all", "ep"), ("all-gather", "sp")},
    ),
    "two levels and ulysses": (
        f"{MOE} --mesh ep=4,cp=2 --moe.a2a_groups 2 --cp.strategy ulysses {ONE_ROUND}",
        {("all-to-all", "ep"), ("all-to-all", "cp")},
    ),
}
"""Name to the words of `ultrascale plan compile`, and collectives of the program; `tests/nightly/hlo` has more."""


def config(name: str) -> Config:
    cfg, _, _ = common.parse(RUNS[name][0].split(), "compile", Options, "")
    return cfg.check(GPUS)


@functools.cache
def program(name: str) -> CompiledStep:
    return compile_step(config(name), GPUS, estimates=False, options=FAST | NO_MACHINE_CODE)


@functools.cache
def step_alone(cfg: Config) -> Reference:
    return reference_step(cfg, 1)


def alone(name: str) -> Reference:
    """Return the step of a run on one device, whose experts have room for every token."""
    return step_alone(change(on_one_device(config(name)), moe={"capacity_factor": ROOM}))


def reference(name: str) -> Reference:
    """Return one device's step, cut into the shards of a run's mesh."""
    cfg, whole = config(name), alone(name)
    mesh = make_mesh(cfg.mesh, jax.devices()[:GPUS])
    with jax.set_mesh(mesh):
        state, batch = {"state": abstract_state(cfg, mesh)}, {"batch": abstract_batch(cfg, mesh)}
    order = sequence_order(cfg.data.seq_len, cfg.mesh.cp, cfg.cp)
    in_order = {
        key: [shards[0][:, order]] if key.startswith("batch") else shards
        for key, shards in whole.arguments.items()
    }
    metrics = {
        key: shards * GPUS for key, shards in whole.results.items() if key.startswith("metrics")
    }
    return Reference(
        arguments=cut(in_order, state | batch, mesh),
        results=cut(whole.results, state, mesh) | metrics,
        seconds=whole.seconds,
    )


def cut(whole: dict[str, Shards], like: dict, mesh: Mesh) -> dict[str, Shards]:
    """Return the arrays of one device in the shards of a tree on `mesh`."""
    shards = {}
    for path, array in jax.tree_util.tree_leaves_with_path(like):
        root, *place = path
        name = root.key + jax.tree_util.keystr(place)
        places = array.sharding.devices_indices_map(array.shape)
        shards[name] = [whole[name][0][places[device]] for device in mesh.devices.flat]
    return shards


# One after another, so that none takes long: the step of one device, which runs of a model share, and each program.


@pytest.mark.parametrize("name", ["zero3", "ep"])
def test_one_device_steps_each_model(name):
    results = alone(name).results
    assert all(np.isfinite(value).all() for [value] in results.values())


@pytest.mark.parametrize("name", RUNS)
def test_a_program_has_its_communication(name):
    collectives = program(name).collectives
    assert RUNS[name][1] <= {(c.kind, axis) for c in collectives for axis in c.axes}


@pytest.mark.parametrize("name", RUNS)
def test_a_program_computes_the_step_of_one_device(name):
    largest = execute_step(program(name), reference(name)).largest
    assert largest.relative <= FLOAT32, largest


def changed(step: CompiledStep, pattern: str, text: str) -> CompiledStep:
    """The program with the first text that matches replaced."""
    changed, count = re.subn(pattern, text, step.text, count=1)
    assert count == 1
    return dataclasses.replace(step, text=changed)


def test_a_write_that_is_missing_leaves_poison():
    pattern = r" dynamic-update-slice\((%[^,]+),[^)]*\)"
    step = changed(program("sp and tp"), pattern, r" copy(\1)")
    assert not execute_step(step, reference("sp and tp")).largest.relative <= FLOAT32


def test_a_read_before_a_gather_is_done_is_a_race():
    pattern = r"\n  %(\S+) = (\w+\[\S+) all-gather-done\((%\S+)\)([^\n]*)"
    early = (
        r"\n  %early = \2 get-tuple-element(\3), index=1"
        r"\n  %\1 = \2 copy(%early)"
        r"\n  %late = \2 all-gather-done(\3)\4"
    )
    step = changed(program("sp and tp"), pattern, early)
    with pytest.raises(RaceError, match="has not finished to write"):
        execute_step(step, reference("sp and tp"))


def test_a_program_of_ones_own_has_all_elements_of_its_constants_and_runs():
    numbers = np.random.default_rng(0).normal(size=100).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(target_devices(2)), ("x",))
    rows = jax.ShapeDtypeStruct((4, 100), np.float32, sharding=NamedSharding(mesh, P("x")))
    own = compile_program(
        jax.jit(lambda x: (x * numbers[None]).sum(0)), rows, mesh=mesh, options=NO_MACHINE_CODE
    )
    shards = np.random.default_rng(1).normal(size=(2, 2, 100)).astype(np.float32)
    assert own.memory_plan is not None
    [result] = Interpreter(own.module, 2, own.memory_plan.places).run([list(shards)])
    expected = (shards.reshape(4, 100) * numbers).sum(0)
    np.testing.assert_allclose(result, [expected, expected], rtol=1e-5, atol=1e-6)
