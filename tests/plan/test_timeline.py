"""The timeline of small programs, computed by hand from `costs.py`, and of a compiled step."""

import json
import math
from pathlib import Path

import pytest

import ultrascale_jax
from ultrascale_jax.cli import command_line, plan
from ultrascale_jax.config import Config, DataConfig, ModelConfig, TrainConfig, UserError
from ultrascale_jax.figures.streams import chrome_trace
from ultrascale_jax.hlo import parse
from ultrascale_jax.hlo.attention import attention_calls, unplanned_workspace
from ultrascale_jax.hlo.memory_traffic import touched
from ultrascale_jax.plan.compiled import compile
from ultrascale_jax.plan.compiled.op_costs import Operations, attention_flops
from ultrascale_jax.plan.compiled.timeline import simulate
from ultrascale_jax.plan.flops import attention_flops_per_token, matmul_params, mean_keys
from ultrascale_jax.plan.formulas import costs, pipeline
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Group, Run

FIXTURES = Path(__file__).parent.parent / "fixtures"
NODE, CLUSTER = find_cluster(None, "h100", 8), find_cluster(None, "h100", 16)
GPU = NODE.gpu
SLOWDOWN = 132 / (132 - 16)
ACROSS = "{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
"""Pairs of two nodes' GPUs."""

PRODUCT = '%y = bf16[8192,8192] custom-call(%a, %a), custom_call_target="__cublas$gemm", lhs_contracting_dims={1}'
NORM = "%x = bf16[8192,8192] fusion(%a), kind=kLoop, calls=%double"
GATHER = (
    "%g{0} = ((bf16[{1},8192]), bf16[{2},8192]) all-gather-start(%w), channel_id={0}, "
    "replica_groups={3}, dimensions={{0}}\n"
)
DONE = "%h{0} = bf16[{2},8192] all-gather-done(%g{0})\n"
SCATTER = (
    "%s = ((bf16[8192,8192]), bf16[1024,8192]) reduce-scatter-start(%a), channel_id=9, "
    "replica_groups=[1,8]<=[8], dimensions={0}\n"
)

PRODUCT_S = costs.gemm_seconds(GPU, 8192, 8192, 8192)
NORM_S = costs.LAUNCH_S + costs.memory_seconds(GPU, 2 * 8192 * 8192 * 2)


def indented(lines):
    return "\n".join(f"  {line.strip()}" for text in lines for line in text.splitlines())


def program(*lines, gathered=8192, computations=""):
    """A scheduled program of 8 devices that runs `lines` on its arguments `a` and `w`."""
    return parse(text_of(*lines, gathered=gathered, computations=computations))


def text_of(*lines, gathered=8192, computations=""):
    body = indented(lines)
    return f"""HloModule m, is_scheduled=true

%double (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %p = bf16[8192,8192] parameter(0)
  ROOT %add = bf16[8192,8192] add(%p, %p)
}}
{computations}
ENTRY %main (a: bf16[8192,8192], w: bf16[{gathered // 8},8192]) -> () {{
  %a = bf16[8192,8192] parameter(0)
  %w = bf16[{gathered // 8},8192] parameter(1)
{body}
}}
"""


def gather(number, rows, text=GATHER, groups="[1,8]<=[8]"):
    return text.format(number, rows // 8, rows, groups)


def gather_s(rows, cluster=NODE, group=None):
    group = group or Group(ranks=8, per_node=8)
    return costs.collective_seconds(cluster, "all-gather", rows * 8192 * 2, group)


def run(module, cluster=NODE, **sizes):
    return simulate(module, sizes or {"fsdp": 8}, cluster)


def test_operations_run_one_after_another():
    timeline = run(program(PRODUCT, NORM))
    assert timeline.step_s == pytest.approx(PRODUCT_S + NORM_S)
    assert timeline.busy_s == pytest.approx({"gemm": PRODUCT_S, "other": NORM_S})
    assert timeline.idle_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("operands", "result", "name"),
    [
        # rows by the matrices of eight experts
        ("bf16[8,8192,4096]", "bf16[8192,4096]", "grouped_matmul"),
        # their gradient
        ("bf16[8192,4096]", "bf16[8,8192,4096]", "grouped_matmul_weight_gradient"),
    ],
)
def test_the_grouped_kernel_multiplies_every_row_once(operands, result, name):
    call = (
        f"%w8 = {operands} copy(%other)\n"
        f'%y = {result} custom-call(%s, %a, %w8), custom_call_target="mosaic_gpu_v2", '
        f'metadata={{op_name="jit(step)/moe/{name}/mpmd_map"}}'
    )
    module = program("%s = s32[8] constant(0)", f"%other = {operands} parameter(2)", call)
    found = [i for i in module.computations["main"] if i.name == "y"]
    assert [dot.flops for i in found for dot in module.dots(i, "main")] == [2 * 8192 * 8192 * 4096]
    assert run(module).busy_s["gemm"] >= costs.gemm_seconds(GPU, 8192, 4096, 8192)


def test_a_collective_longer_than_its_cover_exposes_the_difference():
    rows = 65536
    timeline = run(program(gather(1, rows), NORM, gather(1, rows, DONE), gathered=rows))
    assert gather_s(rows) > NORM_S
    assert timeline.step_s == pytest.approx(gather_s(rows))
    assert timeline.exposed_s == pytest.approx({"fsdp": gather_s(rows) - NORM_S})
    assert timeline.idle_s == pytest.approx(gather_s(rows) - NORM_S)


def test_a_hidden_collective_exposes_nothing_but_slows_the_product_while_it_runs():
    rows = 8192
    timeline = run(program(gather(1, rows), PRODUCT, gather(1, rows, DONE)))
    assert gather_s(rows) < PRODUCT_S
    assert timeline.exposed_s == {"fsdp": 0}
    assert timeline.step_s == pytest.approx(PRODUCT_S + gather_s(rows) * (1 - 1 / SLOWDOWN))


def test_a_product_shorter_than_the_collective_is_slower_as_a_whole():
    rows = 8192 * 64
    timeline = run(program(gather(1, rows), PRODUCT, gather(1, rows, DONE), gathered=rows))
    assert timeline.busy_s["gemm"] == pytest.approx(PRODUCT_S * SLOWDOWN)
    assert timeline.exposed_s["fsdp"] == pytest.approx(gather_s(rows) - PRODUCT_S * SLOWDOWN)


@pytest.mark.parametrize(
    ("options", "product", "norm"),
    [
        ({}, 132 / (132 - 2 * 16), 1),  # both links at once
        ({"comm_streams": {"g1": 0, "g2": 0}}, SLOWDOWN, 1),  # the second waits for the first
        ({"contention": 1.4}, 1.4, 1.4),
    ],
)
def test_two_collectives_slow_a_product_twice_if_they_run_at_once(options, product, norm):
    rows = 8192 * 64
    both = gather(1, rows, groups="[2,8]<=[16]") + gather(2, rows, groups=ACROSS)
    dones = gather(1, rows, DONE), gather(2, rows, DONE)
    module = program(both, PRODUCT, NORM, *dones, gathered=rows)
    busy = simulate(module, {"fsdp": 2, "sp": 8}, CLUSTER, **options).busy_s
    assert busy == pytest.approx({"gemm": PRODUCT_S * product, "other": NORM_S * norm})


def test_each_collective_beside_a_product_costs_its_multiprocessors_as_long_as_it_runs():
    sizes = 8192 * 2, 8192
    both = gather(1, sizes[0], groups="[2,8]<=[16]") + gather(2, sizes[1], groups=ACROSS)
    dones = gather(1, sizes[0], DONE), gather(2, sizes[1], DONE)
    module = program(both, PRODUCT, *dones, gathered=sizes[0])
    groups = Group(ranks=8, per_node=8), Group(ranks=2, per_node=1)
    running = [gather_s(size, CLUSTER, group) for size, group in zip(sizes, groups, strict=True)]
    assert max(running) < PRODUCT_S
    timeline = simulate(module, {"fsdp": 2, "sp": 8}, CLUSTER)
    assert timeline.step_s == pytest.approx(PRODUCT_S + 16 / 132 * sum(running))


def test_without_a_done_of_its_own_a_collective_is_waited_for():
    sync = "%g = bf16[8192,8192] all-gather(%w), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"
    timeline = run(program(sync, NORM))
    assert timeline.step_s == pytest.approx(gather_s(8192) + NORM_S)
    assert timeline.exposed_s == pytest.approx({"fsdp": gather_s(8192)})


def test_collectives_of_one_link_queue():
    rows = 8192
    both = gather(1, rows) + gather(2, rows), gather(1, rows, DONE), gather(2, rows, DONE)
    timeline = run(program(*both))
    assert timeline.step_s == pytest.approx(2 * gather_s(rows))
    first, second = timeline.streams["in node"]
    assert second.start_s == pytest.approx(first.start_s + first.duration_s)


def test_collectives_of_different_links_run_side_by_side():
    rows = 8192
    near, far = Group(ranks=8, per_node=8), Group(ranks=2, per_node=1)
    module = program(
        gather(1, rows, groups="[2,8]<=[16]") + gather(2, rows, groups=ACROSS),
        gather(1, rows, DONE),
        gather(2, rows, DONE),
    )
    timeline = run(module, CLUSTER, fsdp=2, sp=8)
    times = gather_s(rows, CLUSTER, near), gather_s(rows, CLUSTER, far)
    assert timeline.step_s == pytest.approx(max(times))
    assert set(timeline.streams) == {"in node", "between nodes"}
    work = {("all-gather", "sp"): times[0], ("all-gather", "fsdp"): times[1]}
    assert timeline.link_s == pytest.approx(work)
    # On one stream they take turns, and the wait for the second is for both.
    for streams, seconds in (({"g1": 0, "g2": 1}, max(times)), ({"g1": 1, "g2": 1}, sum(times))):
        timeline = simulate(module, {"fsdp": 2, "sp": 8}, CLUSTER, comm_streams=streams)
        assert timeline.step_s == pytest.approx(seconds)
    assert timeline.waited_s == pytest.approx(work)


@pytest.mark.parametrize(
    ("groups", "kind", "group"),
    [
        # cp = 16: pairs of a ring, of which one of eight crosses to the other node.
        ("{{0,1},{1,2},{7,8},{15,0}}", "collective-permute", Group(ranks=2, per_node=1)),
        ("{{0,1},{2,3},{6,7}}", "collective-permute", Group(ranks=2, per_node=2)),
        # Heads for sequence among neighbours of cp, and a gather around the ring of their places.
        ("{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", "all-to-all", Group(ranks=8, per_node=8)),
        ("{{0,4,8,12},{1,5,9,13}}", "all-gather", Group(ranks=4, per_node=2)),
        # Tokens once to each of two nodes, and to the ranks of a node.
        ("[8,2]<=[2,8]T(1,0)", "all-to-all", Group(ranks=2, per_node=1)),
        ("mesh['cp'=16] {'cp':(2)8}", "all-to-all", Group(ranks=8, per_node=8)),
    ],
)
def test_a_part_of_an_axis_talks_over_the_links_that_its_devices_have(groups, kind, group):
    pairs = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    line = f"%g = bf16[8192,8192] {kind}(%a), channel_id=1, {pairs}={groups}"
    timeline = run(program(line), CLUSTER, cp=16)
    seconds = costs.collective_seconds(CLUSTER, kind, 8192 * 8192 * 2, group)
    assert timeline.link_s == pytest.approx({(kind, "cp"): seconds})
    assert set(timeline.streams) == {"in node" if group.nodes == 1 else "between nodes"}


def test_what_the_wait_is_for_is_what_the_link_does_meanwhile():
    rows = 8192
    module = program(SCATTER + gather(2, rows), gather(2, rows, DONE))
    timeline = run(module)
    assert timeline.waited_s["all-gather", "fsdp"] == pytest.approx(gather_s(rows))
    assert timeline.waited_s["reduce-scatter", "fsdp"] > 0


LOOP = """
%cond (p: bf16[8192,8192]) -> pred[] {
  %p = bf16[8192,8192] parameter(0)
  ROOT %c = pred[] constant(true)
}

%body (a: bf16[8192,8192], w: bf16[1024,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192] parameter(0)
  %w = bf16[1024,8192] parameter(1)
"""
WHILE = '%loop = bf16[8192,8192] while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}'


def looped(*lines):
    return program(WHILE, computations=LOOP + indented(lines) + "\n}\n")


def test_a_loop_multiplies():
    timeline = run(looped(PRODUCT, NORM))
    assert timeline.step_s == pytest.approx(32 * (PRODUCT_S + NORM_S))
    assert timeline.busy_s == pytest.approx({"gemm": 32 * PRODUCT_S, "other": 32 * NORM_S})


def test_a_loop_whose_length_depends_on_data_is_left_out():
    rounds = '%loop = bf16[8192,8192] while(%a), condition=%cond, body=%body, metadata={op_name="rounds"}'
    more = LOOP + indented([PRODUCT, gather(2, 8192), gather(2, 8192, DONE)]) + "\n}\n"
    timeline = run(program(NORM, rounds, computations=more))
    assert timeline.step_s == pytest.approx(NORM_S)
    assert timeline.exposed_s == {}
    assert timeline.left_out == ("rounds",)


def step_of(text, comm_streams=(), **axes):
    """A step with this program, of a run that does not matter."""
    numbers = {"argument_bytes": 0, "temporary_bytes": 0, "host_bytes": 0, "peak_bytes": 0}
    return compile.CompiledStep(
        gpu=GPU,
        run=Run.of(Config(model=ModelConfig(num_layers=1)), 8),
        text=text,
        axes=axes,
        comm_streams=dict(comm_streams),
        compile_s=0.0,
        **numbers,
    )


def test_a_program_is_timed_only_on_the_gpu_that_it_is_compiled_for():
    step = step_of(text_of(PRODUCT), fsdp=8)
    message = r"^cluster\.gpu='a100': the program is compiled for h100; .*compile it for a100$"
    with pytest.raises(UserError, match=message):
        compile.simulate_step(step, find_cluster(None, "a100", 8))


@pytest.mark.parametrize("second", [0, 1])
def test_beside_its_own_streams_a_step_tells_one_stream_none_and_the_most_contention(second):
    long, short = 8192 * 8, 8192
    both = gather(1, long, groups="[2,8]<=[16]") + gather(2, short, groups=ACROSS)
    text = text_of(both, gather(2, short, DONE), PRODUCT, gather(1, long, DONE), gathered=long)
    step = step_of(text, {"g1": 0, "g2": second}, fsdp=2, sp=8)
    first = gather_s(long, CLUSTER, Group(ranks=8, per_node=8))
    last = gather_s(short, CLUSTER, Group(ranks=2, per_node=1))
    assert last < first < last + PRODUCT_S
    # The product starts when the second gather is done: beside the first one, or behind both.
    apart, behind = (
        [seconds + PRODUCT_S + share * beside for share in (16 / 132, 1 - 1 / costs.CONTENTION)]
        for seconds, beside in ((last, first - last), (first + last, 0))
    )
    found = compile.simulate_step(step, CLUSTER)
    assert (found.one_stream_s, found.side_by_side_s) == pytest.approx((behind[0], apart[0]))
    assert (found.step_s, found.contended_s) == pytest.approx((behind, apart)[second])
    told = compile.predict_step(step, found, GPU).summary()
    names = ("step_s", "one_stream_s", "side_by_side_s", "contended_s")
    assert [told[name] for name in names] == [getattr(found, name) for name in names]


def test_a_cluster_of_other_gpus_than_the_programs_mesh_is_refused():
    step = step_of(text_of(PRODUCT), fsdp=2, sp=8)
    message = r"^cluster\.num_gpus=8: the program's mesh fsdp=2,sp=8 takes 16 GPUs; give find_clus"
    with pytest.raises(UserError, match=message):
        compile.simulate_step(step, NODE)


@pytest.mark.parametrize(
    ("where", "warned"),
    [("layers/moe/while", 0), ("loss/from_highest_logits/while", 0), ("layers/while", 1)],
)
def test_a_step_warns_of_a_loop_of_unknown_length_unless_it_is_known_to_be_rare(
    where, warned, recwarn
):
    loop = f'%loop = bf16[8192,8192] while(%a), condition=%cond, body=%body, metadata={{op_name="{where}"}}'
    more = LOOP + indented([PRODUCT]) + "\n}\n"
    step = step_of(text_of(NORM, loop, computations=more), fsdp=8)
    compile.simulate_step(step, NODE)
    assert [where in str(warning.message) for warning in recwarn] == [True] * warned


def test_iterations_that_are_multiplied_take_as_long_as_those_that_are_replayed(monkeypatch):
    # The scatter of one iteration delays the gather of the next: the first iteration is shorter than the others.
    module = looped(gather(2, 8192), NORM, gather(2, 8192, DONE), SCATTER)
    short = simulate(module, {"fsdp": 8}, NODE)
    monkeypatch.setattr("ultrascale_jax.plan.compiled.timeline._same", lambda *_: False)
    full = simulate(module, {"fsdp": 8}, NODE)
    assert short.step_s == pytest.approx(full.step_s)
    assert short.waited_s == pytest.approx(full.waited_s)
    assert short.step_s > 32 * max(NORM_S, gather_s(8192))


def test_events_show_two_iterations_and_fold_the_others():
    timeline = run(looped(PRODUCT, NORM))
    events = timeline.streams["compute"]
    assert [e.name for e in events] == ["y", "x", "y", "x", "loop: 30 more iterations"]
    assert sum(e.duration_s for e in events) == pytest.approx(timeline.step_s)
    three = simulate(looped(PRODUCT, NORM), {"fsdp": 8}, NODE, shown=3)
    assert (
        len(three.streams["compute"]) == 5
    )  # an iteration that repeats the one before is not replayed


BRANCHES = """
%light (p: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192] parameter(0)
  ROOT %x = bf16[8192,8192] fusion(%a), kind=kLoop, calls=%double
}

%heavy (p: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192] parameter(0)
  ROOT %y = bf16[8192,8192] custom-call(%a, %a), custom_call_target="__cublas$gemm", lhs_contracting_dims={1}
}
"""
SWITCH = "%switch = bf16[8192,8192] conditional(%n, %a, %a), branch_computations={%light, %heavy}"


def test_of_two_branches_the_slower_counts_unless_the_caller_knows():
    module = program(SWITCH, computations=BRANCHES)
    assert run(module).step_s == pytest.approx(PRODUCT_S)
    light = simulate(module, {"fsdp": 8}, NODE, share=lambda *_: 0.0)
    assert light.step_s == pytest.approx(NORM_S)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_branch_may_be_taken_in_a_share_of_the_iterations(share):
    module = program(WHILE, computations=BRANCHES + LOOP + indented([SWITCH]) + "\n}\n")
    asked = []
    timeline = simulate(
        module, {"fsdp": 8}, NODE, share=lambda i, trips: asked.append((i.name, trips)) or share
    )
    assert timeline.step_s == pytest.approx(16 * 2 * (share * PRODUCT_S + (1 - share) * NORM_S))
    assert timeline.busy_s.get("gemm", 0.0) == pytest.approx(16 * 2 * share * PRODUCT_S)
    assert set(asked) == {("switch", (32,))}


@pytest.mark.parametrize("block", ["layers/jvp(attention)/cond", "checkpoint/attention/cond"])
def test_attention_without_a_window_is_a_branch_in_the_share_of_its_layers(block):
    words = "gemma3_12b --train.remat full --train.microbatches 64".split()
    cfg, _ = command_line.parse(words, prog="test")
    product = PRODUCT.replace("}", f'}}, metadata={{op_name="jit(step)/{block}/dot"}}')
    module = program(SWITCH, computations=BRANCHES.replace(PRODUCT, product))
    (switch,) = (i for i in module.computations[module.entry] if i.opcode == "conditional")
    assert pipeline.shares(Run.of(cfg, 8), module)(switch, ()) == pytest.approx(1 / 6)


def test_a_wait_for_what_a_branch_delays_is_all_for_collectives():
    """On one stream the gather of a branch taken half of the time comes behind one that runs on after the branch."""
    rows, across = 8192, "{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
    near = ["%a = bf16[8192,8192] parameter(0)", "%w = bf16[1024,8192] parameter(1)"]
    near += [gather(2, rows, groups="[2,8]<=[16]"), gather(2, rows, DONE)]
    branches = "".join(
        f"\n%{name} (p: bf16[8192,8192]) -> bf16[8192,8192] {{\n{indented(body)}\n}}\n"
        for name, body in (("none", near[:1]), ("near", near))
    )
    switch = SWITCH.replace("%light, %heavy", "%none, %near")
    lines = gather(1, rows, groups=across), switch, gather(3, rows, groups=across)
    lines += gather(1, rows, DONE), gather(3, rows, DONE)
    module = program(*lines, computations=branches)
    streams = dict.fromkeys(("g1", "g2", "g3"), 0)
    timeline = simulate(
        module, {"fsdp": 2, "sp": 8}, CLUSTER, comm_streams=streams, share=lambda *_: 0.5
    )
    assert sum(timeline.waited_s.values()) == pytest.approx(timeline.idle_s)


def test_the_library_times_a_pipeline_as_the_command_does(monkeypatch, capsys):
    """Both know in how many ticks a rank has the head."""
    words = "llama3_8b --mesh pp=2 --train.remat full --train.microbatches 32 --train.global-batch 32".split()
    cfg, _ = command_line.parse(words, prog="test")
    switched = BRANCHES + LOOP + indented([SWITCH]) + "\n}\n"
    step = compile.CompiledStep(
        gpu=GPU,
        run=Run.of(cfg, 2), text=text_of(WHILE, computations=switched), axes={"pp": 2},
        argument_bytes=0, temporary_bytes=0, host_bytes=0, peak_bytes=0, compile_s=0.0,
    )  # fmt: skip
    cluster = find_cluster(None, "h100", 2)
    timeline = ultrascale_jax.simulate_step(step, cluster)
    assert NORM_S < timeline.step_s / 32 < PRODUCT_S
    monkeypatch.setattr(compile, "compile_step", lambda *args, **options: step)
    plan.main(["compile", *words, "--gpus", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["step_s"] == timeline.step_s


def test_one_gpu_communicates_nothing():
    alone = gather(1, 8192, groups="{{0}}")
    timeline = simulate(program(alone, gather(1, 8192, DONE)), {"fsdp": 1}, NODE)
    assert timeline.step_s == 0


FUSIONS = """
%slice_computation (p0: f32[32,1024], p1: s32[]) -> bf16[1,1024] {
  %p0 = f32[32,1024] parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %whole = bf16[32,1024] convert(%p0)
  ROOT %part = bf16[1,1024] dynamic-slice(%whole, %p1, %zero), dynamic_slice_sizes={1,1024}
}

%update_computation (p0: f32[32,1024], p1: f32[1,1024], p2: s32[]) -> f32[32,1024] {
  %p2 = s32[] parameter(2)
  %p1 = f32[1,1024] parameter(1)
  %p0 = f32[32,1024] parameter(0)
  %zero = s32[] constant(0)
  ROOT %dus = f32[32,1024] dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%update_then_read_computation (p0: f32[32,1024], p1: f32[1,1024], p2: s32[]) -> f32[32,1024] {
  %p2 = s32[] parameter(2)
  %p1 = f32[1,1024] parameter(1)
  %p0 = f32[32,1024] parameter(0)
  %zero = s32[] constant(0)
  %dus = f32[32,1024] dynamic-update-slice(%p0, %p1, %p2, %zero)
  ROOT %square = f32[32,1024] multiply(%dus, %dus)
}

%scatter_computation (p0: f32[1024,16], p1: s32[8,1], p2: f32[8,16]) -> f32[1024,16] {
  %p0 = f32[1024,16] parameter(0)
  %p1 = s32[8,1] parameter(1)
  %p2 = f32[8,16] parameter(2)
  ROOT %scatter = f32[1024,16] scatter(%p0, %p1, %p2), to_apply=%sum
}

%pair_computation (p0: f32[32,1024]) -> (f32[32,1024], bf16[32,1024]) {
  %p0 = f32[32,1024] parameter(0)
  %twice = f32[32,1024] add(%p0, %p0)
  %half = bf16[32,1024] convert(%p0)
  ROOT %both = (f32[32,1024], bf16[32,1024]) tuple(%twice, %half)
}
"""
STACK = "%stack = f32[32,1024]{0} parameter(0)\n%n = s32[] parameter(1)\n%layer = f32[1,1024] parameter(2)\n"
TABLE = "%table = f32[1024,16] parameter(0)\n%rows = s32[8,1] parameter(1)\n%new = f32[8,16] parameter(2)\n"


@pytest.mark.parametrize(
    ("arguments", "line", "device", "host"),
    [
        # One layer of a stack: 1024 float32 read, as many bfloat16 written, and the index.
        (STACK, "%r = bf16[1,1024] fusion(%stack, %n), calls=%slice_computation", 4096 + 2048 + 4, 0),
        # One layer written in place: the layer read and written.
        (STACK, "%r = f32[32,1024] fusion(%stack, %layer, %n), calls=%update_computation", 8192 + 4, 0),
        # The whole stack with one layer replaced, read for something else: stack and layer read, the result written.
        (
            STACK,
            "%r = f32[32,1024] fusion(%stack, %layer, %n), calls=%update_then_read_computation",
            2 * 131072 + 4096 + 4,
            0,
        ),
        # Rows added in place: each new row read, the old one read, their sum written.
        (TABLE, "%r = f32[1024,16] fusion(%table, %rows, %new), calls=%scatter_computation", 3 * 512 + 32, 0),
        # Two results from one argument, which is read once.
        (STACK, "%r = (f32[32,1024], bf16[32,1024]) fusion(%stack), calls=%pair_computation", (4 + 4 + 2) * 32768, 0),
        (STACK, "%r = f32[32,1024] copy(%stack)", 2 * 131072, 0),
        (STACK, "%r = f32[2,1024] slice(%stack), slice={[0:2], [0:1024]}", 2 * 8192, 0),
        # From the host's memory to the device's.
        (
            STACK.replace("{0}", "{1,0:S(5)}"),
            "%r = ((f32[32,1024]{:S(5)}), bf16[1,1024]) fusion-start(%stack, %n), calls=%slice_computation",
            2048 + 4,
            4096,
        ),
    ],
)  # fmt: skip
def test_only_what_is_read_or_written_counts(arguments, line, device, host):
    entry = f"ENTRY %main () -> () {{\n{arguments}{line}\n}}\n".replace("\n%", "\n  %")
    module = parse("HloModule m, is_scheduled=true\n" + FUSIONS + entry)
    assert touched(module, "main", module.by_name["main"]["r"]) == (device, host)


def test_a_copy_to_the_host_runs_beside_the_product_and_takes_the_bus():
    start = "%c = (f32[8192,8192], f32[8192,8192]{1,0:S(5)}, u32[]) copy-start(%far)"
    done = "%d = f32[8192,8192] copy-done(%c)"
    far = "%far = f32[8192,8192]{1,0:S(5)} parameter(2)"
    timeline = run(program(far, start, PRODUCT, done))
    bus = 8192 * 8192 * 4 / (0.85 * 63e9)
    assert timeline.step_s == pytest.approx(bus + costs.LAUNCH_S)
    assert timeline.idle_s == pytest.approx(bus + costs.LAUNCH_S - PRODUCT_S)
    assert timeline.exposed_s == {}


ATTENTION = (
    "%o = (bf16[2,32,8192,128], f32[2,32,8192], u8[0]) custom-call(%q, %k, %k), "
    'custom_call_target="__cudnn$fmhaSoftmax{}", backend_config={{"cudnn_fmha_backend_config": {{'
    '"intermediate_tensor_shape": {{"dimensions": ["2", "32", "8192", "8192"]}}, '
    '"mask_type": "{}", "sliding_window_length": {}}}}}'
)


@pytest.mark.parametrize(
    ("backward", "mask", "window", "flops"),
    [
        ("", "NO_MASK", 0, 2 * 2 * 2 * 32 * 8192 * 8192 * 128),
        ("", "CAUSAL", 0, 2 * 2 * 32 * 8192 * 8192 * 128),
        ("Backward", "CAUSAL", 0, 5 * 2 * 32 * 8192 * 8192 * 128),
        ("", "CAUSAL", 4096, 2 * 2 * 2 * 32 * 8192 * 3072 * 128),  # 4096 - 4096**2 / 16384 keys
        ("", "NO_MASK", 0, 2 * 2 * 2 * 32 * 8192 * 4096 * 128),  # a block of half as many keys
    ],
)
def test_attention_counts_the_scores_that_the_mask_leaves(backward, mask, window, flops):
    keys = flops // (2 * 2 * 2 * 32 * 8192 * 128) if mask == "NO_MASK" else 8192
    arguments = "%q = bf16[2,8192,32,128] parameter(2)", f"%k = bf16[2,{keys},8,128] parameter(3)"
    call = ATTENTION.replace('"8192", "8192"', f'"8192", "{keys}"')
    module = program(*arguments, call.format(backward, mask, window))
    (call,) = attention_calls(module)
    assert attention_flops(call) == flops
    # Only the backward pass has a workspace: float32 gradients of the queries, and a float32 of each query and head.
    known = 4 * 2 * 8192 * 32 * 129 if backward else 0
    assert unplanned_workspace(module) == known
    planned = program(
        *arguments, ATTENTION.replace("u8[0]", "u8[512]").format(backward, mask, window)
    )
    assert unplanned_workspace(planned) == 0  # XLA asked a device, and plans it
    seconds = costs.attention_seconds(GPU, flops, backward=bool(backward))
    assert run(module).busy_s == pytest.approx({"attention": seconds})
    # The same with an array that masks documents, of which it reads what the causal mask leaves.
    arguments = *arguments, f"%m = bf16[2,1,8192,{keys}] parameter(4)"
    text = ATTENTION.replace('"8192", "8192"', f'"8192", "{keys}"').replace(
        "%k, %k)", "%k, %k, %m)"
    )
    text = text.replace("fmhaSoftmax", "fmhaScaleBiasSoftmax").format(backward, mask, window)
    share = flops / ((5 if backward else 2) * 2 * 2 * 32 * 8192 * keys * 128)
    read = costs.memory_seconds(GPU, share * 2 * 8192 * keys * 2)
    assert run(program(*arguments, text)).busy_s == pytest.approx({"attention": seconds + read})


@pytest.mark.parametrize(("tokens", "own"), [(None, 8192), (1000, 2048), (2048, 2048), (60, 2048)])
@pytest.mark.parametrize("backward", ["", "Backward"])
def test_packed_attention_has_the_work_of_documents_of_one_length(backward, tokens, own):
    arguments, calls = [], []
    for number, L in enumerate((8192, 2048)):
        arguments.append(f"%q{number} = bf16[{16384 // L},{L},32,128] parameter({number + 2})")
        call = ATTENTION.replace(
            '["2", "32", "8192", "8192"]', f'["{16384 // L}", "32", "{L}", "{L}"]'
        )
        call = call.replace("%o", f"%o{number}").replace("(%q, %k, %k)", f"(%q{number})")
        call = call.replace("{}}}}}", '{}, "max_seg_per_batch": 4}}}}')
        calls.append(call.format(backward, "PADDING_CAUSAL", 0))
    module = program(*arguments, *calls)
    products = 5 if backward else 2
    mean = mean_keys(tokens or 8192, None)
    flops = products * 2 * 16384 * 32 * mean * 128
    # Each call clears float32 gradients for four segments in L tokens, and a float32 of each query and head.
    cleared = 4 * 4 * 16384 * 32 * 129 if backward else 0
    assert unplanned_workspace(module) == cleared
    wanted = costs.attention_seconds(GPU, flops, backward=bool(backward))
    wanted += 2 * (costs.LAUNCH_S + costs.memory_seconds(GPU, cleared))
    timeline = simulate(module, {}, NODE, document_tokens=tokens)
    assert timeline.busy_s == pytest.approx({"attention": wanted})
    operations = Operations(module, GPU, tokens)
    found = {
        L: operations.find("main", module.by_name["main"][f"o{n}"]).flops
        for n, L in enumerate((8192, 2048))
    }
    assert found == {8192: 0, 2048: 0} | {own: flops}


@pytest.mark.parametrize(
    ("kind", "names", "seconds"),
    [
        ("kLoop", ("", "sol"), 800.5e-6),
        ("kCustom", ("", "sol"), NORM_S - costs.LAUNCH_S),
        ("kCustom", ("", "indexing-cost-model"), 800.5e-6),
    ],
)
def test_arithmetic_dearer_than_memory_is_taken_from_xla(kind, names, seconds):
    records = [f'{{"exec_time_us":900,"compute_time_us":800.5,"name":"{name}"}}' for name in names]
    cost = f', backend_config={{"reification_cost":[{",".join(records)}]}}'
    timeline = run(program(NORM.replace("kLoop", kind) + cost))
    assert timeline.step_s == pytest.approx(costs.LAUNCH_S + seconds)
    assert 800.5e-6 > NORM_S


def test_what_is_fused_into_a_product_costs_what_it_moves():
    fused = """
%fused (p: bf16[8192,8192], r: f32[8192,8192]) -> bf16[8192,8192] {
  %p = bf16[8192,8192] parameter(0)
  %r = f32[8192,8192] parameter(1)
  %dot = f32[8192,8192] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = bf16[8192,8192] add(%dot, %r)
}
"""
    line = "%y = bf16[8192,8192] fusion(%a, %res), kind=kCustom, calls=%fused"
    module = program("%res = f32[8192,8192] parameter(2)", line, computations=fused)
    operation = Operations(module, GPU).find("main", module.by_name["main"]["y"])
    assert operation is not None and operation.flops == 2 * 8192**3
    # The residual is 4 bytes for each entry; the product reads its argument once where its cost counts it twice.
    extra = costs.memory_seconds(GPU, (4 - 2) * 8192 * 8192)
    assert operation.seconds == pytest.approx(PRODUCT_S + extra)


def test_a_product_of_a_batch_reads_every_matrix():
    left, right = (
        f"{side}_batch_dims={{0}}, {side}_contracting_dims={{{over}}}"
        for side, over in (("lhs", 2), ("rhs", 1))
    )
    fused = f"""
%fused (p: bf16[8,4096,4096]) -> bf16[8,4096,4096] {{
  %p = bf16[8,4096,4096] parameter(0)
  ROOT %dot = bf16[8,4096,4096] dot(%p, %p), {left}, {right}
}}
"""
    lines = [
        "%b = bf16[8,4096,4096] parameter(2)",
        "%y = bf16[8,4096,4096] fusion(%b), kind=kCustom, calls=%fused",
    ]
    module = program(*lines, computations=fused)
    operation = Operations(module, GPU).find("main", module.by_name["main"]["y"])
    one = costs.gemm_seconds(GPU, 4096, 4096, 4096) - costs.LAUNCH_S
    assert operation is not None
    assert operation.seconds == pytest.approx(costs.LAUNCH_S + 8 * one)


def test_a_piece_of_a_real_program():
    """`scheduled.hlo`: 32 times a layer's two gathers, a product between them, and a synchronous scatter."""
    cluster = find_cluster(None, "h100", 8)
    timeline = simulate(
        parse((FIXTURES / "scheduled.hlo").read_text()), {"fsdp": 4, "sp": 2}, cluster
    )
    four, two = Group(ranks=4, per_node=4), Group(ranks=2, per_node=2)
    gathered = costs.collective_seconds(cluster, "all-gather", 7168 * 4096 * 2, four)
    scattered = costs.collective_seconds(cluster, "reduce-scatter", 32768 * 4096 * 2, two)
    exchanged = costs.collective_seconds(cluster, "all-to-all", 8 * 16 * 2, two)
    # The fusion's computation is a stand-in, an addition of scalars: it reads the array and writes two bytes.
    convert = costs.LAUNCH_S + costs.memory_seconds(GPU, 7168 * 1024 * 2 + 2)
    product = costs.gemm_seconds(GPU, 32768, 4096, 7168)
    # The second gather runs beside the product, and slows it; the scatter waits for neither.
    slowed = product + gathered * (1 - 1 / SLOWDOWN)
    layer = max(convert, gathered) + slowed + scattered
    assert timeline.step_s == pytest.approx(exchanged + 32 * layer)
    assert timeline.exposed_s["sp"] == pytest.approx(exchanged - convert + 32 * scattered)


def test_the_trace_has_a_row_for_each_stream_and_every_event():
    timeline = run(looped(gather(2, 8192), PRODUCT, gather(2, 8192, DONE)))
    events = json.loads(json.dumps(chrome_trace(timeline.streams)))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "in node"]
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == sum(len(stream) for stream in timeline.streams.values())
    last = max(e["ts"] + e["dur"] for e in shown)
    assert last == pytest.approx(timeline.step_s * 1e6)


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989.4e12), ("fp8_rowwise", 1978.9e12)])
def test_speed_is_that_of_the_run(precision, peak):
    words = "llama3_8b --mesh fsdp=8 --train.remat full --train.microbatches 1 --train.precision"
    cfg, _ = command_line.parse([*words.split(), precision], prog="test")
    planned = Run.of(cfg, 8)
    timeline = run(program(PRODUCT))
    step = compile.CompiledStep(
        gpu=GPU,
        run=planned, text=text_of(PRODUCT), axes={"fsdp": 8},
        argument_bytes=1, temporary_bytes=2, host_bytes=0, peak_bytes=3, compile_s=0.0,
    )  # fmt: skip
    found = compile.predict_step(step, timeline, GPU)
    assert found.tokens_per_s_gpu == planned.step_tokens / 8 / timeline.step_s
    assert found.mfu == pytest.approx(planned.step_flops / 8 / timeline.step_s / peak)
    assert found.parts["matrix products"] == timeline.busy_s["gemm"]
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.peak_bytes == 3 and found.verdict == "fits"


@pytest.mark.wide
def test_a_compiled_step_does_the_operations_that_the_model_needs():
    from ultrascale_jax.plan.compiled.compile import compile_step

    cfg = Config(
        model=ModelConfig(
            vocab_size=1024,
            d_model=512,
            d_ff=1536,
            num_layers=6,
            num_heads=8,
            num_kv_heads=8,
            head_dim=64,
        ),
        data=DataConfig(seq_len=512, document_mask=False),
        train=TrainConfig(global_batch=4, zero=3, remat="selective"),
    ).check(2)
    step = compile_step(cfg, 2, estimates=False)
    operations = Operations(step.module, GPU)
    found = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    for name, loops in step.module.walk():
        for instruction in step.module.computations[name]:
            if instruction.opcode not in ("while", "call", "conditional"):
                operation = operations.find(name, instruction)
                if operation is not None:
                    found[operation.kind] += operation.flops * math.prod(
                        trips or 1 for trips in loops
                    )
    tokens = cfg.train.global_batch * cfg.data.seq_len / 2
    assert found["gemm"] == pytest.approx(6 * matmul_params(cfg.model) * tokens)
    # Backward runs the first of the forward pass's two products again.
    needed = attention_flops_per_token(cfg.model, cfg.data.seq_len) * tokens
    assert found["attention"] == pytest.approx(needed * 7 / 6)
    timeline = simulate(step.module, step.axes, find_cluster(None, "h100", 2))
    assert timeline.link_s.keys() >= {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}
    assert sum(timeline.busy_s.values()) + timeline.idle_s == pytest.approx(timeline.step_s)
    assert sum(timeline.waited_s.values()) == pytest.approx(timeline.idle_s)
    assert sum(timeline.work_s.values()) == pytest.approx(sum(timeline.busy_s.values()))
    assert {block for kind, block in timeline.work_s if kind == "attention"} == {"attention"}
    products = {block for kind, block in timeline.work_s if kind == "gemm"}
    assert products == {"attention", "mlp", "loss"}
