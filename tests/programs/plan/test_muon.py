"""Muon's update in a program for H100s, and by formula: memory, bytes of its exchanges, and their overlap."""

import pytest

from tests.gpu_programs import compiled, pick
from tests.programs.plan.test_placement import DEEP
from ultrascale_jax.plan.formulas import muon
from ultrascale_jax.plan.formulas.costs import ring_bytes
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.workload import Run


def test_the_program_is_the_formula():
    mesh = {"fsdp": 4, "sp": 2}
    cfg, step = compiled(8, mesh, model=DEEP, optim={"name": "muon"})
    run = Run.of(cfg, 8)
    assert breakdown(run).planned_bytes == pytest.approx(step.peak_bytes, rel=0.05)
    exchanges = {axis: pick(step.collectives, "all-to-all", axis) for axis in ("fsdp", "sp")}
    for axis, said in muon.sent_bytes(run).items():
        ranks = mesh[axis]
        sizes = (c.times * ring_bytes(c.kind, c.operand_bytes, ranks) for c in exchanges[axis])
        assert sum(sizes) == pytest.approx(said, rel=0.1)
    # Both ways, of seven stacks: no exchange but a group's first and last has nothing to hide behind.
    every = [c for found in exchanges.values() for c in found]
    assert sum(not c.asynchronous for c in every) <= 4 < len(every)
