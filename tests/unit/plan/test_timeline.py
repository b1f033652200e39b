"""The timeline of small programs, computed by hand from `costs.py`, and of a compiled step."""

import math
from pathlib import Path

import pytest

import ultrascale_jax
from tests.small_programs import (
    ACROSS,
    BRANCHES,
    CLUSTER,
    DONE,
    GPU,
    LOOP,
    NODE,
    NORM,
    PRODUCT,
    SCATTER,
    SWITCH,
    WHILE,
    gather,
    indented,
    looped,
    program,
    step_of,
    text_of,
)
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import Config, DataConfig, MeshConfig, UserError
from ultrascale_jax.hlo import parse
from ultrascale_jax.hlo.attention import attention_calls, unplanned_workspace
from ultrascale_jax.plan.compiled import compile
from ultrascale_jax.plan.compiled.op_costs import Operations, attention_flops
from ultrascale_jax.plan.compiled.timeline import simulate
from ultrascale_jax.plan.flops import mean_keys
from ultrascale_jax.plan.formulas import costs, pipeline
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Group, Run

FIXTURES = Path(__file__).parents[2] / "fixtures"
SLOWDOWN = 132 / (132 - 16)
PRODUCT_S = costs.gemm_seconds(GPU, 8192, 8192, 8192)
NORM_S = costs.LAUNCH_S + costs.memory_seconds(GPU, 2 * 8192 * 8192 * 2)


def gather_s(rows, cluster=NODE, group=None):
    group = group or Group(ranks=8, per_node=8)
    return costs.collective_seconds(cluster, "all-gather", rows * 8192 * 2, group)


def run(module, cluster=NODE, **sizes):
    return simulate(module, sizes or {"fsdp": 8}, cluster)


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


@pytest.mark.parametrize(
    ("groups", "kind", "group"),
    [
        # cp = 16: pairs of a ring, of which one of eight crosses to the other node.
        ("{{0,1},{1,2},{7,8},{15,0}}", "collective-permute", Group(ranks=2, per_node=1)),
        # A gather around the ring of places whose neighbours exchange heads.
        ("{{0,4,8,12},{1,5,9,13}}", "all-gather", Group(ranks=4, per_node=2)),
        # Tokens to the ranks of a node.
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


@pytest.mark.parametrize(
    ("axes", "gpu", "message"),
    [
        ({"fsdp": 8}, "a100", r"^cluster\.gpu='a100': the program is compiled for h100; .* a100$"),
        (
            {"fsdp": 2, "sp": 8},
            "h100",
            r"^cluster\.num_gpus=8: the program's mesh fsdp=2,sp=8 .* 16",
        ),
    ],
)
def test_a_program_is_timed_only_on_the_gpus_that_it_is_compiled_for(axes, gpu, message):
    with pytest.raises(UserError, match=message):
        compile.simulate_step(step_of(text_of(PRODUCT), **axes), find_cluster(None, gpu, 8))


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


@pytest.mark.parametrize(
    ("where", "warned"),
    [("layers/moe/while", 0), ("loss/from_highest_logits/while", 0), ("layers/while", 1)],
)
def test_a_loop_whose_length_depends_on_data_is_left_out_with_a_warning_unless_it_is_rare(
    where, warned, recwarn
):
    loop = f'%loop = bf16[8192,8192] while(%a), condition=%cond, body=%body, metadata={{op_name="{where}"}}'
    body = LOOP + indented([PRODUCT, gather(2, 8192), gather(2, 8192, DONE)]) + "\n}\n"
    timeline = compile.simulate_step(step_of(text_of(NORM, loop, computations=body), fsdp=8), NODE)
    assert timeline.step_s == pytest.approx(NORM_S)
    assert (timeline.exposed_s, timeline.left_out) == ({}, (where,))
    assert [where in str(warning.message) for warning in recwarn] == [True] * warned


def test_a_loop_over_documents_is_as_long_as_the_run_and_their_length_make_it():
    """In zigzag a place of 8,192 tokens has chunks of 4,096: two tiles of a full row, one of a document of 4,000."""
    cfg = Config(mesh=MeshConfig(cp=8), data=DataConfig(seq_len=8 * 8192))
    where = "attention/document_tiles/while"
    loop = f'%loop = bf16[8192,8192] while(%a), condition=%cond, body=%body, metadata={{op_name="{where}"}}'
    body = LOOP + indented([NORM]) + "\n}\n"
    for tokens, trips in ((None, 2), (4000, 1)):
        run = Run.of(cfg, 8, document_tokens=tokens)
        step = step_of(text_of(loop, computations=body), run=run, cp=8)
        timeline = compile.simulate_step(step, NODE)
        assert timeline.step_s == pytest.approx(trips * NORM_S) and timeline.left_out == ()


def test_iterations_that_are_multiplied_take_as_long_as_those_that_are_replayed(monkeypatch):
    # The scatter of one iteration delays the gather of the next: the first iteration is shorter than the others.
    module = looped(gather(2, 8192), NORM, gather(2, 8192, DONE), SCATTER)
    short = simulate(module, {"fsdp": 8}, NODE)
    monkeypatch.setattr("ultrascale_jax.plan.compiled.timeline._same", lambda *_: False)
    full = simulate(module, {"fsdp": 8}, NODE)
    assert short.step_s == pytest.approx(full.step_s)
    assert short.waited_s == pytest.approx(full.waited_s)
    assert short.step_s > 32 * max(NORM_S, gather_s(8192))


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_slower_branch_is_taken_always_or_in_a_share_of_the_iterations(share):
    module = program(WHILE, computations=BRANCHES + LOOP + indented([SWITCH]) + "\n}\n")
    assert run(module).step_s == pytest.approx(16 * 2 * PRODUCT_S)
    asked = []
    timeline = simulate(
        module, {"fsdp": 8}, NODE, share=lambda i, trips: asked.append((i.name, trips)) or share
    )
    assert timeline.step_s == pytest.approx(16 * 2 * (share * PRODUCT_S + (1 - share) * NORM_S))
    assert timeline.busy_s.get("gemm", 0.0) == pytest.approx(16 * 2 * share * PRODUCT_S)
    assert set(asked) == {("switch", (32,))}


def test_attention_without_a_window_is_a_branch_in_the_share_of_its_layers():
    words = "gemma3_12b --train.remat full --train.microbatches 64".split()
    cfg, _ = command_line.parse(words, prog="test")
    place = "jit(step)/layers/jvp(attention)/cond/dot"
    product = PRODUCT.replace("}", f'}}, metadata={{op_name="{place}"}}')
    module = program(SWITCH, computations=BRANCHES.replace(PRODUCT, product))
    (switch,) = (i for i in module.computations[module.entry] if i.opcode == "conditional")
    assert pipeline.shares(Run.of(cfg, 8), module)(switch, ()) == pytest.approx(1 / 6)


def test_a_wait_for_what_a_branch_delays_is_all_for_collectives():
    """On one stream the gather of a branch taken half of the time comes behind one that runs on after the branch."""
    rows = 8192
    near = ["%a = bf16[8192,8192] parameter(0)", "%w = bf16[1024,8192] parameter(1)"]
    near += [gather(2, rows, groups="[2,8]<=[16]"), gather(2, rows, DONE)]
    branches = "".join(
        f"\n%{name} (p: bf16[8192,8192]) -> bf16[8192,8192] {{\n{indented(body)}\n}}\n"
        for name, body in (("none", near[:1]), ("near", near))
    )
    switch = SWITCH.replace("%light, %heavy", "%none, %near")
    lines = gather(1, rows, groups=ACROSS), switch, gather(3, rows, groups=ACROSS)
    lines += gather(1, rows, DONE), gather(3, rows, DONE)
    module = program(*lines, computations=branches)
    streams = dict.fromkeys(("g1", "g2", "g3"), 0)
    timeline = simulate(
        module, {"fsdp": 2, "sp": 8}, CLUSTER, comm_streams=streams, share=lambda *_: 0.5
    )
    assert sum(timeline.waited_s.values()) == pytest.approx(timeline.idle_s)


def test_a_step_of_a_pipeline_knows_in_how_many_ticks_a_rank_has_the_head():
    words = "llama3_8b --mesh pp=2 --train.remat full --train.microbatches 32 --train.global-batch 32".split()
    cfg, _ = command_line.parse(words, prog="test")
    switched = BRANCHES + LOOP + indented([SWITCH]) + "\n}\n"
    step = step_of(text_of(WHILE, computations=switched), run=Run.of(cfg, 2), pp=2)
    timeline = ultrascale_jax.simulate_step(step, find_cluster(None, "h100", 2))
    assert NORM_S < timeline.step_s / 32 < PRODUCT_S


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


@pytest.mark.parametrize(("tokens", "own"), [(None, 8192), (1000, 2048)])
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


@pytest.mark.parametrize("tokens", [None, 1000, 12_000])
def test_on_a_ring_documents_are_cut_and_a_block_has_what_two_chunks_share(tokens):
    """Own documents and a block of a tile of 2,048 queries by a chunk of 8,192 keys, in a row that is one chunk."""
    packed = ATTENTION.replace("{}}}}}", '{}, "max_seg_per_batch": 4}}}}')
    packed = packed.format("", "PADDING_CAUSAL", 0)
    block = ATTENTION.replace('"8192", "8192"', '"2048", "8192"').replace("%o", "%b")
    block = block.replace("%q", "%t").format("", "PADDING", 0)
    tile = "%t = bf16[2,2048,32,128] parameter(4)"
    arguments = "%q = bf16[2,8192,32,128] parameter(2)", "%k = bf16[2,8192,8,128] parameter(3)"
    module = program(*arguments, tile, packed, block)
    own, shared = (
        Operations(module, GPU, tokens).find("main", module.by_name["main"][name]).flops
        / (2 * 2 * 2 * 32 * 128)
        for name in "ob"
    )
    half = {None: 8192, 1000: 500, 12_000: 6000}[tokens]
    tiles = math.ceil(half / 2048)
    assert shared * tiles == pytest.approx(half**2)
    # Both together are the documents' own work, where a chunk has one border.
    if tokens == 1000:
        assert own + shared == pytest.approx(8192 * mean_keys(1000, None))
    else:
        assert own == pytest.approx(8192 * mean_keys(8192, None))


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
