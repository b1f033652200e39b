"""`plan memory --explain mesh` names the bytes that a GPU's compiled program sends along each axis."""

import dataclasses
import math

import pytest

from tests.gpu_programs import MODEL, compiled, pick, sent_bytes
from ultrascale_jax.config import Experts
from ultrascale_jax.plan.formulas import muon
from ultrascale_jax.plan.formulas.costs import ring_bytes
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.placement import communication
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run

# Many layers, so that what comes once a step or once a loop is little beside them.
DEEP = dataclasses.replace(
    MODEL, num_layers=32, d_model=1024, d_ff=2816, num_heads=16, num_kv_heads=4
)
EXPERTS = Experts(num=16, top_k=4, d_ff=512)


def check_sent_bytes(mesh, **run):
    """Compare the bytes along every axis of a mesh, within a tenth."""
    num_devices = math.prod(mesh.values())
    cfg, step = compiled(num_devices, {"fsdp": 1} | mesh, model=DEEP, **run)
    said = {}
    for sent in communication(
        Run.of(cfg, num_devices), find_cluster(None, "h100", num_devices)
    ).values():
        said[sent.axes] = said.get(sent.axes, 0.0) + sent.sent_bytes
    assert sent_bytes(step, said) == pytest.approx(said, rel=0.1)


def test_four_axes():
    check_sent_bytes({"dp": 2, "fsdp": 2, "cp": 2, "sp": 2}, global_batch=8, seq_len=2048)


def test_muons_exchanges_and_memory_are_those_of_the_formula():
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
