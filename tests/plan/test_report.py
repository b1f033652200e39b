"""The figures of `plan/report`: their numbers, and what is refused."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from tests.recipes import pinned
from ultrascale_jax.config import MeshConfig, UserError, with_changes
from ultrascale_jax.configs import llama3_8b
from ultrascale_jax.figures.charts import Bars, Heat
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.formulas import cheatsheet
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.report import files, plans, runs
from ultrascale_jax.plan.report.plans import Scenario
from ultrascale_jax.plan.search.ranking import Candidate
from ultrascale_jax.training.model_shape import ModelShape
from ultrascale_jax.units import GIB

RUNS = str(Path(__file__).parent.parent / "data/plan/playbook_runs.csv")
HEAD = "model,nodes,mbs,gas,gbs,dp,pp,tp,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb\n"
NEGATIVE = json.dumps(
    {
        "verb": "memory",
        "label": "fsdp8",
        "gpu": "h100",
        "parts": {"parameters": -GIB},
        "timeline": [],
        "usable_bytes": 72 * GIB,
    }
)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    cfg = dataclasses.replace(pinned(llama3_8b.config), mesh=MeshConfig(fsdp=8, sp=8))
    return Scenario(
        name="llama3_8b",
        cfg=cfg,
        cluster=find_cluster(None, "h100", 64),
        shape=ModelShape.of(cfg.model),
    )


@pytest.fixture(scope="module")
def of_runs() -> dict[str, Figure]:
    return {figure.name: figure for figure in files.figures([files.read(RUNS)])}


def test_a_stack_is_as_high_as_the_breakdown(scenario):
    figure = plans.by_sequence(scenario)
    bars = {bar.label: bar for bar in figure.panels["recompute selective"]}
    assert list(bars) == ["2k", "4k", "8k", "16k", "32k"]
    run = dataclasses.replace(scenario.run, remat="selective", seq_len=4096, sequences=1)
    expected = breakdown(run)
    assert bars["4k"].total == pytest.approx(expected.peak_bytes / GIB, rel=1e-6)
    held = {name: size / GIB for name, size in expected.parts.items() if size}
    assert bars["4k"].parts == pytest.approx(held)
    assert figure.limit == scenario.cluster.gpu.usable_bytes / GIB
    row = next(r for r in figure.table().rows if r[:2] == ("recompute selective", "4k"))
    assert row[-2] == bars["4k"].total


def test_zero_shards_the_state_and_more_gpus_hold_less_of_it(scenario):
    panels = plans.by_zero(scenario).panels
    totals = {panel: [bar.total for bar in bars] for panel, bars in panels.items()}
    assert max(totals["ZeRO 0"]) == pytest.approx(min(totals["ZeRO 0"]), rel=0.01)
    for stage in ("ZeRO 1", "ZeRO 2", "ZeRO 3"):
        assert totals[stage] == sorted(totals[stage], reverse=True)
        assert totals[stage][-1] < 0.9 * totals[stage][0]
    assert [bar.label for bar in panels["ZeRO 3"]] == ["1", "2", "4", "8"]  # sp 8 takes the rest


def test_an_axis_has_only_the_sizes_that_divide_the_model(scenario):
    panels = plans.by_split(scenario).panels
    assert [bar.label for bar in panels["tensor (tp)"]] == ["1", "2", "4", "8", "16"]
    few = dataclasses.replace(
        scenario.cfg, model=dataclasses.replace(scenario.cfg.model, num_layers=3)
    )
    few = dataclasses.replace(scenario, cfg=few, shape=ModelShape.of(few.model))
    assert [bar.label for bar in plans.by_split(few).panels["pipeline (pp)"]] == ["1", "2"]


def test_scaling_marks_what_does_not_fit(scenario):
    lines = plans.scaling(scenario).panels["batch split"]
    assert [p.solid for p in lines["dp"]] == [False] * len(lines["dp"])  # 16 bytes x 8 G parameters
    assert [p.solid for p in lines["fsdp"]][:1] == [False]
    assert lines["fsdp"][-1].solid and lines["fsdp"][-1].x == 64
    assert all(p.y > 0 and f"fsdp{p.x:.0f}" in p.note for p in lines["fsdp"][1:])


def test_communication_over_computation_is_the_cheat_sheets_of_each_size(scenario):
    panels = plans.communication(scenario).panels
    batch, split = panels["batch split"], panels["model or sequence split"]
    assert {tuple(p.x for p in line) for line in batch.values()} == {(2, 4, 8, 16, 32, 64)}
    assert {tuple(p.x for p in line) for line in split.values()} == {(2, 4, 8, 16, 32)}
    shape, tokens = scenario.shape, scenario.run.step_tokens
    ring = 1e9 * min(scenario.cluster.intra_gbs, 8 * scenario.cluster.inter_gbs)
    speed = scenario.cluster.gpu.peak_flops("bf16") * shape.num_params / shape.active_params / ring
    # An all-reduce of float32 moves 8 N (n - 1) / n bytes once a step; a token's backward pass takes 4 N FLOPs.
    assert batch["dp"][-1].y == pytest.approx(2 * 63 * speed / tokens)
    assert batch["fsdp"][-1].y == pytest.approx(63 / 64 * speed / scenario.run.seq_len)
    own = cheatsheet.cheat_sheet(scenario.varied({"tp": 8}), find_cluster(None, "h100", 8))
    assert split["tp"][2].y == next(row.ratio for row in own if row.strategy == "TP")


def test_a_tensor_group_splits_what_is_kept_and_sp_the_inputs_of_layers_too(scenario):
    cfg = with_changes(scenario.cfg, mesh=scenario.cfg.mesh, remat="selective")
    panels = plans.by_tensor(dataclasses.replace(scenario, cfg=cfg)).panels
    assert list(panels) == ["fsdp 64", "fsdp 8, tp 8", "fsdp 8, sp 8"]
    none, tp, sp = ({bar.label: bar.parts for bar in bars}["32k"] for bars in panels.values())
    inputs, mlp = "activations: layer inputs", "activations: mlp"
    assert none[inputs] == tp[inputs] == pytest.approx(8 * sp[inputs])
    assert none[mlp] == pytest.approx(8 * tp[mlp]) == pytest.approx(8 * sp[mlp])


def test_more_micro_batches_need_less_memory_and_keep_the_global_batch(scenario):
    memory, throughput = plans.by_microbatches(scenario).panels.values()
    rows = scenario.run.sequences * scenario.run.microbatches
    for remat in ("none", "selective", "dots", "full"):
        line = memory[f"recompute {remat}"]
        assert [p.x for p in line] == [2**n for n in range(len(line))] and line[-1].x == rows
        assert all(a.y > b.y for a, b in itertools.pairwise(line))
        assert all(p.solid == (p.y <= scenario.limit["limit"]) for p in line)
    tokens = {p.y for p in throughput["recompute full"]}
    own = dataclasses.replace(scenario.run, remat="full")
    assert scenario.estimated(own).tokens_per_s_gpu in tokens and len(tokens) > 1


def test_step_parts_add_up_to_the_estimate(scenario):
    from ultrascale_jax.plan.formulas.step_time import estimate

    bars = {bar.label: bar for bar in plans.step_parts(scenario).panels["tensor and sequence (sp)"]}
    tried = [scenario.varied({"sp": 4, "fsdp": 16}, sequences=n) for n in (1, 2, 4, 8, 16, 32)]
    steps = [estimate(run, scenario.cluster) for run in tried if run]
    times = [step.step_s for step in steps if step.fits]
    assert len(times) > 1 and bars["4"].total == pytest.approx(min(times))


def test_the_heat_map_of_the_playbooks_runs_is_the_playbooks(of_runs):
    """The figure's cells as `playbook.md` section 1i lists them; two of 1B rank otherwise by tokens than by MFU."""
    heat = of_runs["best"]
    assert isinstance(heat, Heat)
    assert heat.rows == ("1B", "8B") and heat.columns == ("1", "2", "4", "8", "16", "32", "64")
    assert heat.cells["8B", "1"].value == 7503
    assert heat.cells["8B", "1"].text == "dp2 pp4\nmbs1 gas128 z1\n63.1 GiB"
    assert heat.cells["8B", "32"].text.startswith("dp32 tp8\nmbs8 gas1 z0")
    assert heat.cells["1B", "1"].text.startswith("dp8\n") and heat.cells["1B", "1"].value == 40150
    assert heat.cells["1B", "64"].text.startswith("dp128 tp2 pp2\nmbs2 gas1 z1")


def test_the_fastest_run_of_each_family_is_the_playbooks(of_runs):
    lines = of_runs["families"].panels["8B"]
    by_nodes = {family: {p.x / 8: p.y for p in points} for family, points in lines.items()}
    pp, tp = by_nodes["dp and pp"], by_nodes["dp and tp"]
    assert [(pp[n], tp[n]) for n in (1, 8, 16, 32, 64)] == [
        (7503, 7141),
        (6555, 6539),
        (5397, 6028),
        (3552, 5428),
        (1224, 3101),
    ]


def test_every_run_with_a_result_is_a_point(of_runs):
    clouds = of_runs["runs"]
    count = sum(len(points) for c in clouds.panels.values() for points in c.groups.values())
    assert count == len(clouds.table().rows) == 1027
    assert "1,027 runs" in clouds.caption and "616 more" in clouds.caption


def test_a_sweep_names_its_axes_and_counts_all_of_them():
    head = HEAD.strip() + ",mesh,remat"
    row = 'llama3_8b,2,2,16,256,4,1,2,3,40,7000.0,112000,50.0,"fsdp=4,cp=2,sp=2",full'
    figures = {f.name: f for f in runs.figures(runs.read("a.csv", f"{head}\n{row}\n"), "a.csv")}
    cell = figures["best"].cells["llama3_8b", "2"]
    assert cell.text == "fsdp4 cp2 sp2\nmbs2 gas16 z3 full\n50.0 GiB"
    (point,) = figures["families"].panels["llama3_8b"]["dp and tp"]
    assert (point.x, point.y) == (16, 7000.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "x", "give a .json or .csv file"),
        ("a.json", None, "there is no such file"),
        ("a.json", " \n", "is empty"),
        ("a.json", "{", r"is not JSON \(.*: line 1 "),
        ("a.json", '{"verb": 1%s}' % ("0" * 5000), r"is not JSON \(.* digits"),
        ("a.json", "[" * 100_000, r"is not JSON \("),
        ("a.json", "[1]", "has no field 'verb'"),
        ("a.json", '{"label": 1}', "has no field 'verb'"),
        ("a.json", '{"verb": "guess"}', "verb='guess' has no figures"),
        ("a.json", '{"verb": "memory", "label": "x"}', "lacks the field 'parts'"),
        ("a.json", '{"verb": "compile", "label": "x"}', "lacks the field"),
        ("a.json", '{"verb": "search", "rows": 3}', "not what `search` writes"),
        ("a.json", '{"verb": "validate", "cells": []}', "verb='validate' has no figures"),
        ("a.json", NEGATIVE, "not what `memory` writes: -1.0 is no size"),
        ("a.csv", "a,b\n1,2\n", r"lacks the column\(s\) model, nodes"),
        ("a.csv", HEAD.replace("pp,", ""), r"lacks the column\(s\) pp$"),
        ("a.csv", HEAD, "has no rows"),
        (
            "a.csv",
            HEAD + "1B,1,2,16,256,eight,1,1,0,1,1,1,1\n",
            "line 2: dp='eight': must be a whole number",
        ),
        ("a.csv", HEAD + "1B,0,2,16,256,8,1,1,0,1,1,1,1\n", "line 2: nodes=0: must be at least 1"),
        ("a.csv", HEAD + "1B,1,2,16,256,8,1,1,0,1,-1,1,1\n", "tok_s_gpu=-1.0: must be at least 0"),
        ("a.csv", HEAD + "1B,1,2\n", "line 2: gas=None: must be a whole number"),
        ("a.csv", HEAD + "1B,1,2,16,256,8,1,1,0,nan,nan,nan,nan\n", "no row has a throughput"),
        ("a.csv", b"\xff\xfe\x00", "is not UTF-8 text; convert it, as by iconv -f UTF-16 "),
    ],
)
def test_a_file_that_is_not_understood_is_named_with_the_field(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        files.figures([files.read(str(path))])
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_memory_files_stand_side_by_side(tmp_path):
    for n in (1, 2):
        content = {
            "verb": "memory",
            "label": f"fsdp{n} zero3",
            "gpu": "h100",
            "parts": {"parameters": n * GIB, "nothing": 0},
            "timeline": [["model init", n * GIB]],
            "peak_bytes": n * GIB,
            "usable_bytes": 72 * GIB,
        }
        (tmp_path / f"{n}.json").write_text(json.dumps(content))
    sources = [files.read(str(tmp_path / f"{n}.json")) for n in (1, 2)]
    peaks, moments = files.figures(sources)
    assert isinstance(peaks, Bars) and peaks.limit == 72
    assert [bar.parts for bar in peaks.panels[""]] == [{"parameters": 1.0}, {"parameters": 2.0}]
    assert set(moments.panels) == {"fsdp1 zero3", "fsdp2 zero3"}
    (alone,) = files.figures(sources[:1])
    assert set(alone.panels) == {"at the peak, by part", "through two steps"}


def test_a_cell_breaks_its_lines_before_offloaded_tensors_too(scenario):
    remat = "save:q,k,v,attn_core,attn_out+offload:gate,up"
    run = dataclasses.replace(scenario.run, remat=remat)
    step = estimate(run, dataclasses.replace(scenario.cluster, num_gpus=run.num_gpus))
    lines = plans._cell(Candidate(formula=step, refusal="")).text.splitlines()
    assert "+offload:gate, up" in lines and max(map(len, lines)) <= plans.CELL_WIDTH
