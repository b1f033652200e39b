"""The program of a table, run by a reference interpreter: every value is found where it was put, and slots are few."""

import numpy as np
import pytest

from ultrascale_jax.config import SCHEDULES
from ultrascale_jax.parallel.pipeline.orders import forward_only
from ultrascale_jax.parallel.pipeline.program import PORTS, assemble
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.segments import MOST_SEGMENTS
from ultrascale_jax.plan.schedules.measures import in_flight, w_queue

SIZES = ((2, 4), (3, 6), (4, 8), (4, 16))
"""Ranks and micro-batches."""


def interpret(program, stash):
    """Follow the program with names for values; fails where a slot holds something else than the table wants."""
    schedule, ranks, every = program.schedule, program.ranks, program.every
    last = schedule.num_stages - 1
    sizes = {"X": program.slots.inputs, "G": program.slots.gradients}
    sizes |= {"R": program.slots.residuals, "W": program.slots.weights}
    held = {(kind, r): {} for kind in sizes for r in range(schedule.ranks)}

    def put(kind, rank, slot, value):
        assert slot < sizes[kind], "an operation writes to the slot of idle ranks"
        held[kind, rank][slot] = value

    def get(kind, rank, slot):
        return held[kind, rank][slot]

    for t, row in enumerate(schedule.ticks):
        cell = {name: table[t] for name, table in ranks.items()}
        sent = {"forward": {}, "backward": {}}
        for r, ops in enumerate(row):
            if "F" in ops:
                mb, stage = ops["F"]
                assert (cell["forward_on"][r], cell["forward_mb"][r], cell["forward_chunk"][r]) == (
                    1,
                    mb,
                    schedule.chunk_of(stage),
                )
                if stage == 0:
                    assert every["embed"][t] and every["embed_mb"][t] == mb
                    put("X", r, cell["forward_input"][r], (mb, 0))
                assert get("X", r, cell["forward_input"][r]) == (mb, stage)
                if stash == "residuals":
                    put("R", r, cell["forward_residuals"][r], (mb, stage))
                if stage == last:
                    assert every["head"][t] and every["head_mb"][t] == mb
                sent["forward"][r] = (mb, stage + 1)
            if "B" in ops:
                mb, stage = ops["B"]
                assert get("G", r, cell["backward_gradient"][r]) == (mb, stage)
                slot = cell["backward_input" if stash == "input" else "backward_residuals"][r]
                assert get("X" if stash == "input" else "R", r, slot) == (mb, stage)
                if schedule.split:
                    put("W", r, cell["backward_queue"][r], (mb, stage))
                if stage == 0:
                    assert every["embed_gradient"][t] and every["embed_gradient_mb"][t] == mb
                sent["backward"][r] = (mb, stage - 1)
            if "W" in ops:
                assert get("W", r, cell["weight_queue"][r]) == ops["W"]
        for r, ops in enumerate(row):
            if "F" in ops and ops["F"][1] == last:
                put("G", r, cell["head_gradient"][r], ops["F"])
        for k, kind in (("forward", "X"), ("backward", "G")):
            for port in PORTS:
                for source, to in program.ports.get(f"{k}_{port}", ()):
                    slot = cell[f"{k}_{port}"][to]
                    if slot < sizes[kind]:
                        put(kind, to, slot, sent[k][source])
    return held


@pytest.mark.parametrize("stash", ["residuals", "input"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_value_is_found_where_it_was_put(name, stash):
    for p, m in SIZES:
        interpret(assemble(build(name, p, m), stash), stash)


@pytest.mark.parametrize("name", SCHEDULES)
def test_buffers_have_the_size_of_the_peak(name):
    for p, m in SIZES:
        schedule = build(name, p, m)
        slots = assemble(schedule).slots
        assert slots.residuals == max(in_flight(schedule)), (p, m)
        assert slots.weights == max(w_queue(schedule), default=0), (p, m)
        assert assemble(schedule, "input").slots.residuals == 0, (p, m)


@pytest.mark.parametrize("m", [16, 256])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_number_of_scans_does_not_grow_with_micro_batches(name, m):
    program = assemble(build(name, 4, m))
    assert len(program.segments) <= MOST_SEGMENTS
    assert [s.start for s in program.segments[1:]] == [s.stop for s in program.segments[:-1]]
    assert program.segments[-1].stop == len(program.schedule.ticks)
    for segment in program.segments:
        run = program.schedule.ticks[segment.start : segment.stop]
        assert {kind for row in run for cell in row for kind in cell} <= segment.kinds


def test_forward_operations_alone_keep_nothing():
    slots = assemble(forward_only(4, 2, "loop", 16)).slots
    assert (slots.residuals, slots.gradients, slots.weights) == (0, 0, 0)
    assert slots.inputs == assemble(forward_only(4, 2, "loop", 64)).slots.inputs


def test_what_a_tick_reads_ahead_is_the_next_tick_s():
    program = assemble(build("1f1b", 2, 4))
    columns, before = program.columns(program.ranks)
    assert (before["next_forward_first"] == program.ranks["forward_first"][0]).all()
    np.testing.assert_array_equal(
        columns["next_backward_gradient"][:-1], program.ranks["backward_gradient"][1:]
    )
