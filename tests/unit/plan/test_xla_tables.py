"""The tables of compiled programs, docs/planning/*.csv: the formulas beside XLA's own memory plan and schedule."""

from functools import cache
from itertools import pairwise
from statistics import median

import pytest

from scripts.validation import xla_tables
from ultrascale_jax.config import SCHEDULES
from ultrascale_jax.plan.formulas import pipeline
from ultrascale_jax.plan.formulas.activations import layer_of, saved_bytes
from ultrascale_jax.plan.formulas.memory import state
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.formulas.pipeline_memory import w_queue_bytes
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.search.search_space import UNEVEN
from ultrascale_jax.plan.verdict import POSSIBLE, SURE, by_formula, by_program
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB


def kept(name: str) -> list[dict[str, str]]:
    return xla_tables.read(xla_tables.PLANNING / f"{name}.csv")


@cache
def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table, with what the formulas say today."""
    return [xla_tables.with_formula(row) for row in kept(name)]


def planned(row: dict[str, str]) -> Run:
    return Run.of(*xla_tables.config(row))


def find(name: str, **wanted: str) -> dict[str, str]:
    """The row with full recomputation and these columns."""
    (row,) = (r for r in rows(name) if wanted.items() <= r.items() and r["remat"] == "full")
    return row


def ways() -> list[dict[str, str]]:
    """The rows of the full Qwen3 30B-A3B on 128 H100s, one for each way to the experts."""
    return [r for r in rows("experts") if (r["model"], r["layers"]) == ("QWEN3_30B_A3B", "all")]


def growing() -> list[dict[str, str]]:
    """Each schedule's rows of a growing number of micro-batches, one sequence of 4,096 tokens each."""
    fields = {"model": "LLAMA3_8B", "mesh": "pp=4,fsdp=2", "remat": "full"}
    return [row for row in rows("pipelines") if fields.items() <= row.items()]


@pytest.mark.parametrize("name", xla_tables.NAMES)
def test_a_table_is_complete_and_has_the_formulas_as_they_are(name):
    hint = f"run: python -m scripts.validation.xla_tables {name}"
    assert all(row["xla_bytes"] for row in kept(name)), hint
    assert rows(name) == kept(name), hint


@pytest.mark.parametrize("held", ["-", "held"])
@pytest.mark.parametrize(
    ("name", "least_rows", "middle", "worst"),
    [
        ("memory_xla", 20, 5, 15),
        ("pipelines", 9, 2, 10),
        ("context", 5, 3, 10),
        ("experts", 5, 5, 15),
    ],
)
def test_the_memory_formulas_agree_with_xla(name, held, least_rows, middle, worst):
    errors = [abs(float(row["error_pct"])) for row in rows(name) if row["held"] == held]
    assert len(errors) >= least_rows
    assert median(errors) < middle
    assert max(errors) < worst


@pytest.mark.parametrize(
    ("name", "middle", "ends"),
    [
        ("pipelines", (0.85, 1.05), (0.7, 1.3)),
        ("context", (0.9, 1.02), (0.8, 1.1)),
        ("experts", (0.9, 1.1), (0.75, 1.25)),
    ],
)
def test_the_step_by_formula_is_what_the_simulation_of_the_schedule_says(name, middle, ends):
    some = ways() if name == "experts" else rows(name)
    ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in some]
    assert middle[0] < median(ratios) < middle[1]
    assert ends[0] < min(ratios) and max(ratios) < ends[1]


def test_what_rests_between_steps_is_what_xla_takes_as_arguments():
    for row in rows("memory_xla"):
        run = planned(row)
        rests = sum(state(run, weights_of(run)).values())
        assert rests == pytest.approx(int(row["argument_bytes"]), rel=1e-3), row


@pytest.mark.parametrize("name", ["context", "experts"])
def test_the_planner_finds_that_everything_fits_that_xla_fits(name):
    usable = find_gpu("h100").usable_bytes
    for row in rows(name):
        assert max(int(row["xla_bytes"]), int(row["formula_bytes"])) <= usable, row


def test_what_fits_by_formula_fits_and_what_does_not_does_not():
    ratios = {
        (row["mesh"], n): int(row["xla_bytes"]) / int(row["formula_bytes"])
        for name in xla_tables.NAMES
        for n, row in enumerate(kept(name))
        if int(row["xla_bytes"]) > 8 * GIB
    }
    assert len(ratios) > 140
    wrong = [mesh for (mesh, _), r in ratios.items() if r > 1 / SURE or r < 1 / POSSIBLE]
    assert len(wrong) == 4 and all(mesh.partition("ep=")[2] in ("32", "64") for mesh in wrong)


def test_the_bands_of_the_verdict():
    judged = [by_formula(n, 100) for n in (90, 91, 92, 106, 107)]
    assert judged == ["fits"] * 2 + ["unsure"] * 2 + ["does not fit"]
    assert [by_program(n, 100) for n in (100, 101)] == ["fits", "does not fit"]


# Long sequences


def test_zigzag_is_faster_than_natural_order_and_exchanged_heads_than_a_long_ring():
    def step_s(**wanted: str) -> float:
        return float(find("context", **wanted)["formula_step_s"])

    eight = {"mesh": "cp=8", "seq_len": "131072", "model": "LLAMA3_8B"}
    zigzag = step_s(**eight, strategy="zigzag", ulysses="1")
    assert step_s(**eight, strategy="ring") > 1.5 * zigzag
    assert step_s(**eight, strategy="ulysses") < zigzag
    many = {"mesh": "cp=64", "seq_len": "1048576", "strategy": "zigzag"}
    assert step_s(**many, ulysses="8") < step_s(**many, ulysses="1")


def test_communication_is_hidden_where_pieces_are_long():
    for row in rows("context"):
        run = planned(row)
        if run.ring[0] > 1 and run.context.strategy != "allgather" and run.mesh.tensor == 1:
            hidden = run.seq_len / run.ring[0] >= 16384
            step = estimate(run, find_cluster(None, "h100", run.num_gpus))
            for waits in (step.parts.get("exposed cp", 0.0), float(row["exposed_cp_s"])):
                assert waits < (0.02 if hidden else 0.1) * step.step_s, row


# Experts


def test_a_token_that_travels_once_to_a_node_is_waited_for_less():
    def exposed_s(ep: int, nodes: int = 1) -> float:
        wanted = {"nodes": str(nodes), "overlap": "off"}
        runs = [planned(r) for r in ways() if wanted.items() <= r.items()]
        (run,) = (run for run in runs if run.mesh.ep == ep)
        return estimate(run, find_cluster(None, "h100", run.num_gpus)).parts["exposed ep"]

    assert exposed_s(64, nodes=8) < exposed_s(64)
    assert exposed_s(8) < exposed_s(16) < exposed_s(64)


# Pipelines


def test_every_schedule_for_lock_step_has_a_row():
    assert {row["schedule"] for row in rows("pipelines")} == set(SCHEDULES) - set(UNEVEN)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_uniform"])
def test_memory_is_flat_in_the_microbatches(schedule):
    found = [row for row in growing() if row["schedule"] == schedule]
    # XLA's column is without the state.
    for column, rests in (("temporary_bytes", 0), ("formula_bytes", found[0]["argument_bytes"])):
        sizes = [int(row[column]) - int(rests) for row in found]
        assert len(sizes) == 4
        assert max(sizes) < 1.1 * min(sizes)
        assert sizes[3] == pytest.approx(sizes[2], rel=1e-3)


def test_memory_of_afab_grows_by_what_a_stage_keeps():
    for row, longer in pairwise(row for row in growing() if row["schedule"] == "afab"):
        run = planned(row)
        layer = layer_of(run)
        # What the layers of a stage keep, and the gradient that waits at the end of the pipeline.
        stage = run.rank_layers * sum(saved_bytes(run, layer).values())
        stage += layer.width * layer.residual
        grown = int(longer["temporary_bytes"]) - int(row["temporary_bytes"])
        assert grown == pytest.approx(run.microbatches * stage, rel=0.02)


def test_zero_bubble_takes_no_more_than_interleaving_and_its_w_queue():
    for m in ("8", "64"):
        by = {row["schedule"]: row for row in growing() if row["microbatches"] == m}
        run = planned(by["zb_uniform"])
        chunks = pipeline.counts(run).slots["weights"] + 1
        queue = chunks * run.chunk_layers * w_queue_bytes(run, layer_of(run))
        added = int(by["zb_uniform"]["xla_bytes"]) - int(by["interleaved"]["xla_bytes"])
        assert added < 1.05 * queue
