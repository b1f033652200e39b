"""The planner counts of a pipeline what the executor's table holds."""

import pytest

from ultrascale_jax.config import SCHEDULES, MeshConfig
from ultrascale_jax.parallel.pipeline import executor as executor
from ultrascale_jax.parallel.pipeline.program import assemble
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.plan.formulas import pipeline
from ultrascale_jax.plan.formulas.pipeline import Key
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.schedules.measures import in_flight, w_queue
from ultrascale_jax.plan.workload import Run

CASES = [(name, virtual) for name in SCHEDULES for virtual in (0, 3)] + [("interleaved", 4)]
CASES = [case for case in CASES if not case[1] or case[0] in ("interleaved", "zb_uniform")]


def run(schedule="1f1b", p=4, m=8, virtual=0, **fields) -> Run:
    own = virtual or build(schedule, p, m).virtual
    return Run(
        shape=ModelShape(num_layers=24),
        mesh=MeshConfig(pp=p, fsdp=2),
        seq_len=4096,
        sequences=1,
        microbatches=m,
        schedule=schedule,
        virtual_stages=own,
        **fields,
    )


@pytest.mark.parametrize(("schedule", "virtual"), CASES)
def test_a_large_table_is_counted_from_small_ones(schedule, virtual):
    for p in (2, 3, 4):
        for m in (2 * p, 3 * p, 7 * p, 8 * p, 11 * p, 16 * p):
            key = Key(schedule, p, m, virtual or build(schedule, p, m).virtual)
            assert pipeline._counts(key) == pipeline._joined(*pipeline._counted(key)), (p, m)


@pytest.mark.parametrize("stash", ["residuals", "input"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_counts_are_those_of_the_executors_program(schedule, stash):
    made = build(schedule, 4, 12)
    program, found = assemble(made, stash), pipeline.counts(run(schedule, 4, 12, stash=stash))
    assert found.slots == vars(program.slots)
    for kind in "FBW":
        ticks = sum(s.stop - s.start for s in program.segments if kind in s.kinds)
        assert found.ticks[kind] == ticks
    assert found.peaks == {"in_flight": max(in_flight(made)), "w_queue": max(w_queue(made))}
    assert found.times.keys() == {"embed", "head", "embed_gradient"}
    for name, times in found.times.items():
        assert program.every[name].sum() <= times <= len(made.ticks)
