"""The reader of HLO text on pieces of real programs for H100s, shortened by hand (`tests/fixtures/*.hlo`)."""

from pathlib import Path

import pytest

from ultrascale_jax.hlo import Array, Dot, matmuls, parse
from ultrascale_jax.hlo.collectives import find_collectives, groups
from ultrascale_jax.hlo.live_buffers import CLASSES, live_bytes, read_plan
from ultrascale_jax.hlo.streams import communication_streams

AXES = {"fsdp": 4, "sp": 2}
FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def module():
    return parse((FIXTURES / "scheduled.hlo").read_text())


def found(module, name):
    return next(c for c in find_collectives(module, AXES) if c.name == name)


def test_a_collective_has_its_axes_its_loops_and_its_bytes(module):
    kinds = sorted(c.kind for c in find_collectives(module, AXES))
    assert kinds == ["all-gather", "all-gather", "all-to-all", "reduce-scatter"]
    gather, scatter, once = (
        found(module, n) for n in ("all-gather-start.4", "reduce-scatter.21", "async-start")
    )
    assert (gather.axes, scatter.axes, once.axes) == (("fsdp",), ("sp",), ("sp",))
    assert gather.asynchronous and not scatter.asynchronous
    assert (gather.loops, gather.times, once.loops) == ((32,), 32, ())
    assert gather.operands == (Array("bf16", (7168, 1024)),)
    assert (gather.operand_bytes, gather.result_bytes) == (7168 * 1024 * 2, 7168 * 4096 * 2)
    assert gather.step_operand_bytes == 32 * gather.operand_bytes
    assert once.step_operand_bytes == once.operand_bytes
    assert gather.op_name == "jit(step)/layers/mlp"
    arrays = next(i for i in module.computations["main"] if i.name == "a").arrays
    assert [array.space for array in arrays] == [0, 0, 5]


def test_compute_between_start_and_done_is_counted(module):
    first, second, outside = (
        found(module, n) for n in ("all-gather-start.4", "all-gather-start.5", "async-start")
    )
    assert (first.hidden_by, first.hidden_by_heavy) == (1, 0)
    assert (second.hidden_by, second.hidden_by_heavy) == (2, 1)
    assert (outside.hidden_by, outside.hidden_by_heavy) == (1, 1)


def test_the_stream_of_a_collective_is_read_from_the_dump_of_the_thunks():
    sequence = """
014: kAsyncStart     [prev=013 (1)  | next=023 (3) ] stream=communication_stream[1], async_id=14
    015: kAllToAll [source | sink] kAllToAll
296: kAsyncStart     [prev=126 (1)  | next=334 (21)] stream=computation_stream[1], async_id=296
    050: kAsyncStart    [prev=000 (1)  | next=000 (10)] stream=communication_stream[0], async_id=50
"""
    names = {
        14: "all-to-all-start.1",
        15: "all-to-all.1",
        296: "slice-start",
        50: "all-gather-start.2",
    }
    metadata = "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
        for number, name in names.items()
    )
    found = communication_streams(sequence, metadata)
    assert found == {"all-to-all-start.1": 1, "all-gather-start.2": 0}


def test_matmuls_inside_fusions_count_their_operations(module):
    (matmul,) = matmuls(module)
    assert matmul.loops == (32,)
    assert matmul.flops == 2 * 32768 * 7168 * 4096
    assert not matmul.attention


def test_a_matrix_product_knows_its_shape():
    program = parse((FIXTURES / "cublas.hlo").read_text())
    (call,) = [i for i in program.computations["main"] if i.opcode == "custom-call"]
    assert program.dots(call, "main") == [Dot(1, 32, 16, 64, "bf16")]


def test_batches_of_products_are_no_rows():
    dims = "lhs_batch_dims={0,1}, rhs_batch_dims={0,1}, lhs_contracting_dims={3}, rhs_contracting_dims={3}"
    program = parse(f"""HloModule m, is_scheduled=true
ENTRY %main (q: f32[2,3,5,7], k: f32[2,3,11,7]) -> f32[2,3,5,11] {{
  %q = f32[2,3,5,7] parameter(0)
  %k = f32[2,3,11,7] parameter(1)
  ROOT %dot = f32[2,3,5,11] dot(%q, %k), {dims}
}}
""")
    assert program.dots(program.computations["main"][-1], "main") == [Dot(6, 5, 11, 7, "f32")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3)]),
        ("replica_groups=[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [(0, 1, 2, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", [(0, 2, 1, 3)]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [(0, 2), (1, 3)]),
        ("source_target_pairs={{0,1},{1,0}}", [(0, 1), (1, 0)]),
    ],
)
def test_replica_groups_are_read_in_every_form(text, expected):
    assert groups(f"channel_id=1, {text}, dimensions={{0}}", 4) == expected


@pytest.mark.parametrize("text", ["", "HloModule m\n\nENTRY %main (a: f32[]) -> f32[] {\n}\n"])
def test_text_that_is_not_a_schedule_is_refused(text):
    with pytest.raises(ValueError, match="is_scheduled"):
        parse(text)


STEP = """HloModule step, is_scheduled=true

ENTRY main {
  p.1 = f32[16]{0} parameter(0), metadata={op_name="state.params.w"}
  tokens.1 = s32[4]{0} parameter(1), metadata={op_name="batch['tokens']"}
  all-gather.1 = f32[64]{0} all-gather(p.1), metadata={op_name="jit(step)/jvp()/gather"}
  dot.1 = f32[8]{0} dot(all-gather.1, all-gather.1), metadata={op_name="jit(step)/jvp()/dot_general"}
  add.1 = f32[8]{0} add(dot.1, dot.1), metadata={op_name="jit(step)/jvp()/add"}
  dot.2 = f32[8]{0} dot(add.1, dot.1), metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
  ROOT sub.1 = f32[16]{0} subtract(p.1, dot.2), metadata={op_name="jit(step)/optimizer/sub"}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 p.1 @0> (size=64,offset=0): f32[16]{0}
 value: <9 sub.1 @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 16, page 0, parameter 1, shape |s32[4]| at ShapeIndex {}:
 value: <2 tokens.1 @0> (size=16,offset=0): s32[4]{0}
allocation 2: size 4, page 0, thread-local:
 value: <3 x.1 @0> (size=4,offset=0): f32[]
allocation 3: size 320, page 0, preallocated-temp:
 value: <4 all-gather.1 @0> (size=256,offset=0): f32[64]{0}
 value: <5 dot.1 @0> (size=32,offset=256): f32[8]{0}
 value: <6 add.1 @0> (size=32,offset=288): f32[8]{0}
 value: <7 dot.2 @0> (size=32,offset=288): f32[8]{0}
"""
LIVE = """HloLiveRange (max 7):
  InstructionSequence:
    0:p.1
    1:tokens.1
    2:all-gather.1
    3:dot.1
    4:add.1
    5:dot.2
    6:sub.1
  BufferLiveRange:
    p.1{}:0-6
    all-gather.1{}:2-3
    dot.1{}:3-5
    add.1{}:4-5
    dot.2{}:5-6
  Live ranges at 3 (peak):
    all-gather.1{}: 256 bytes (cumulative: 256 bytes)
"""


def test_buffers_are_told_by_their_maker_and_their_life_and_a_shared_place_counts_once():
    live = live_bytes(read_plan(ASSIGNMENT, LIVE), parse(STEP))
    held = {kind: row.tolist() for kind, row in zip(CLASSES, live.T, strict=True) if row.any()}
    assert held == {
        "master parameters": [64] * 7,
        "batch": [16] * 7,
        "communication buffers": [0, 0, 256, 256, 0, 0, 0],
        "activations: kept": [0, 0, 0, 32, 32, 32, 0],
        # `dot.2` takes the place of `add.1` in the end.
        "gradients": [0, 0, 0, 0, 32, 32, 32],
    }
