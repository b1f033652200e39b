"""H100 programs of tiny runs, one for each kind of communication, executed from poisoned memory: the CPU's step."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.gpu_programs import FAST, NO_MACHINE_CODE
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.compile import Options
from ultrascale_jax.hlo.interpreter import Interpreter, RaceError
from ultrascale_jax.plan.compiled.compile import (
    CompiledStep,
    compile_program,
    compile_step,
    target_devices,
)
from ultrascale_jax.plan.compiled.execute import Reference, execute_step, reference_step

GPUS = 8
FLOAT32 = 1e-5
"""Largest relative difference of an output of a float32 step."""
TINY = "--model.num_layers 2 --data.seq_len 32 --data.no-document-mask --train.global_batch 8 --train.remat none"
DEBUG, MOE = f"debug {TINY}", f"moe_debug {TINY}"
RUNS = {
    "zero1 and allgather": (
        f"{DEBUG} --mesh dp=2,fsdp=2,cp=2 --train.zero 1 --cp.strategy allgather",
        {("all-reduce", "dp"), ("all-gather", "fsdp"), ("all-gather", "cp")},
    ),
    "sp and tp": (
        f"{DEBUG} --mesh fsdp=2,sp=2,tp=2",
        {("all-gather", "sp"), ("all-reduce", "tp"), ("reduce-scatter", "fsdp")},
    ),
    "pp and zigzag": (
        f"{DEBUG} --mesh pp=2,cp=2,fsdp=2 --train.microbatches 2",
        {("collective-permute", "pp"), ("collective-permute", "cp")},
    ),
    "two levels and ulysses": (
        f"{MOE} --mesh ep=4,cp=2 --moe.a2a_groups 2 --cp.strategy ulysses",
        {("all-to-all", "ep"), ("all-to-all", "cp")},
    ),
}
"""Name to the words of `ultrascale plan compile`, and collectives of the program; `tests/nightly/hlo` has more."""


@functools.cache
def program(name: str) -> CompiledStep:
    cfg, _, _ = common.parse(RUNS[name][0].split(), "compile", Options, "")
    return compile_step(cfg, GPUS, estimates=False, options=FAST | NO_MACHINE_CODE)


@functools.cache
def reference(name: str) -> Reference:
    cfg, _, _ = common.parse(RUNS[name][0].split(), "compile", Options, "")
    return reference_step(cfg, GPUS)


# Compiled, stepped on the CPU and executed one after another, so that none of the three takes too long.


@pytest.mark.parametrize("name", RUNS)
def test_a_program_has_its_communication(name):
    assert RUNS[name][1] <= {(c.kind, axis) for c in program(name).collectives for axis in c.axes}


@pytest.mark.parametrize("name", RUNS)
def test_the_cpus_step_is_finite(name):
    assert all(np.isfinite(shards[0]).all() for shards in reference(name).results.values())


@pytest.mark.parametrize("name", RUNS)
def test_a_program_computes_the_cpus_step(name):
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
