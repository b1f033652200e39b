"""The interpreter of GPU programs, on programs of a few lines written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultrascale_jax.hlo import parse
from ultrascale_jax.hlo.custom_calls import Attention, Span, backward, forward
from ultrascale_jax.hlo.interpreter import DeadlockError, Interpreter, RaceError
from ultrascale_jax.hlo.live_buffers import Place
from ultrascale_jax.hlo.operations import Unsupported

SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %total = f32[] add(%a, %b)
}
"""
ROW = np.arange(4, dtype=np.float32)


def run(entry, *arguments, computations=SUM, devices=1, places=None):
    """Run the lines of an entry computation; an argument is an array for all devices, or a list of one for each."""
    text = f"HloModule test, is_scheduled=true\n\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"
    shards = [x if isinstance(x, list) else [x] * devices for x in arguments]
    return Interpreter(parse(text), devices, places).run(shards)


def place(name, *index, offset=0, size=16, allocation=0):
    return {(name, index): Place(allocation, offset, size)}


def test_a_fusion_and_a_loop_compute_what_they_say():
    computations = """%double (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %twice = f32[4]{0} add(%x, %x)
}

%goes_on (state: (s32[], f32[4])) -> pred[] {
  %state = (s32[], f32[4]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%turn, %three), direction=LT
}

%body (state.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  %turn.1 = s32[] get-tuple-element(%state.1), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%turn.1, %one)
  %row = f32[4]{0} get-tuple-element(%state.1), index=1
  %grown = f32[4]{0} fusion(%row), kind=kLoop, calls=%double
  ROOT %both = (s32[], f32[4]{0}) tuple(%next, %grown)
}
"""
    [_, [grown]] = run(
        """  %row.1 = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{0}) tuple(%zero, %row.1)
  ROOT %while = (s32[], f32[4]{0}) while(%start), condition=%goes_on, body=%body""",
        ROW,
        computations=computations,
    )
    np.testing.assert_array_equal(grown, 8 * ROW)


def test_each_collective_moves_what_its_groups_say():
    rows = [ROW + 10 * device for device in range(4)]
    results = run(
        """  %x = f32[4]{0} parameter(0)
  %gather = f32[8]{0} all-gather(%x), replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}
  %swapped = f32[16]{0} all-gather(%x), replica_groups=mesh['a'=2,'b'=2] {'b','a'}, dimensions={0}
  %reduced = f32[4]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %scattered = f32[2]{0} reduce-scatter(%x), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%sum
  %exchanged = f32[4]{0} all-to-all(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %sent = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2}}
  ROOT %all = (f32[8]{0}, f32[16]{0}, f32[4]{0}, f32[2]{0}, f32[4]{0}, f32[4]{0}) tuple("""
        "%gather, %swapped, %reduced, %scattered, %exchanged, %sent)",
        rows,
        devices=4,
    )
    gather, swapped, reduced, scattered, exchanged, sent = results
    np.testing.assert_array_equal(gather[1], np.concatenate([rows[1], rows[3]]))
    np.testing.assert_array_equal(swapped[3], np.concatenate([rows[n] for n in (0, 2, 1, 3)]))
    np.testing.assert_array_equal(reduced[2], rows[2] + rows[3])
    np.testing.assert_array_equal(scattered[1], (rows[0] + rows[1])[2:])
    np.testing.assert_array_equal(exchanged[2], [2, 12, 22, 32])
    np.testing.assert_array_equal(sent, [0 * ROW, rows[0], rows[1], 0 * ROW])


def test_a_result_of_another_type_than_declared_is_an_error():
    with pytest.raises(TypeError, match=r"made float32\[4\], not f32\[5\]") as caught:
        run("  %x = f32[4]{0} parameter(0)\n  ROOT %y = f32[5]{0} add(%x, %x)", ROW)
    assert "%y = f32[5]{0} add" in caught.value.__notes__[0]


def test_an_operation_that_is_not_known_is_named():
    with pytest.raises(Unsupported, match="%y: custom call mine"):
        run('  ROOT %y = f32[4]{0} custom-call(), custom_call_target="mine"')
    with pytest.raises(Unsupported, match="%y: opcode fft"):
        run("  %x = f32[4]{0} parameter(0)\n  ROOT %y = f32[4]{0} fft(%x)", ROW)


# Memory


def test_memory_that_nobody_wrote_is_nan():
    [[stack]] = run(
        """  %x = f32[4]{0} parameter(0)
  %stack = f32[2,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %row = f32[1,4]{1,0} bitcast(%x)
  %zero = s32[] constant(0)
  ROOT %written = f32[2,4]{1,0} dynamic-update-slice(%stack, %row, %zero, %zero)""",
        ROW,
        places=place("stack", size=32) | place("written", size=32),
    )
    np.testing.assert_array_equal(stack[0], ROW)
    assert np.isnan(stack[1]).all()


READS_AFTER = """  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} add(%x, %x)
  ROOT %z = f32[4]{0} add(%x, %y)"""


def test_a_read_of_overwritten_memory_is_an_error_also_of_a_donated_argument():
    apart = place("x") | place("y", offset=16) | place("z", offset=32)
    [[result]] = run(READS_AFTER, ROW, places=apart)
    np.testing.assert_array_equal(result, 3 * ROW)
    [[in_place]] = run(READS_AFTER, ROW, places=apart | place("z"))
    np.testing.assert_array_equal(in_place, 3 * ROW)
    with pytest.raises(RaceError, match="z reads x on device 0, whose memory y has overwritten"):
        run(READS_AFTER, ROW, places=apart | place("y", offset=12))


def flight(between, user="%g.1"):
    return f"""  %x = f32[4]{{0}} parameter(0)
  %w = f32[4]{{0}} add(%x, %x)
  %g = (f32[4]{{0}}, f32[8]{{0}}) all-gather-start(%w), replica_groups={{{{0,1}}}}, dimensions={{0}}
  {between}
  %g.1 = f32[8]{{0}} all-gather-done(%g)
  ROOT %z = f32[8]{{0}} add({user}, {user})"""


WORK = "%y = f32[4]{0} multiply(%x, %x)"
FLIGHT = (
    place("x")
    | place("w", offset=16)
    | place("g", 1, offset=32, size=32)
    | place("y", offset=64)
    | place("z", offset=80, size=32)
)


def test_what_stands_between_a_start_and_its_done_may_touch_neither_operand_nor_result():
    [result] = run(flight(WORK), ROW, devices=2, places=FLIGHT)
    np.testing.assert_array_equal(result[0], 4 * np.concatenate([ROW, ROW]))
    with pytest.raises(RaceError, match=r"y writes to the memory of w on device 0, which g uses"):
        run(flight(WORK), ROW, devices=2, places=FLIGHT | place("y", offset=16))
    with pytest.raises(RaceError, match=r"y writes to the memory of g on device 0, which g uses"):
        run(flight(WORK), ROW, devices=2, places=FLIGHT | place("y", offset=48))
    early = "%early = f32[8]{0} get-tuple-element(%g), index=1\n  %y = f32[8]{0} copy(%early)"
    with pytest.raises(RaceError, match="y reads what g has not finished to write"):
        run(flight(early), ROW, devices=2)


# Control flow


BRANCHES = """%sums (a.1: f32[4]) -> f32[4] {
  %a.1 = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%a.1), replica_groups=GROUPS, to_apply=%sum
}

%keeps (a.2: f32[4]) -> f32[4] {
  %a.2 = f32[4]{0} parameter(0)
  ROOT %k = f32[4]{0} negate(%a.2)
}
"""
CHOICE = """  %choice = s32[] parameter(0)
  %x = f32[4]{0} parameter(1)
  ROOT %y = f32[4]{0} conditional(%choice, %x, %x), branch_computations={%sums, %keeps}"""


def test_devices_take_branches_of_their_own_and_a_collective_waits_for_its_whole_group():
    choices = [np.int32(n) for n in (0, 0, 1, 7)]
    rows = [ROW + device for device in range(4)]

    def take(groups):
        branches = SUM + BRANCHES.replace("GROUPS", groups)
        return run(CHOICE, choices, rows, computations=branches, devices=4)[0]

    result = take("{{0,1},{2,3}}")
    np.testing.assert_array_equal(result[0], rows[0] + rows[1])
    np.testing.assert_array_equal(result[3], -rows[3])
    with pytest.raises(DeadlockError, match=r"devices \[0, 1\] wait in r for \[2, 3\]"):
        take("{{0,1,2,3}}")


def test_a_branch_may_hand_on_what_the_other_one_updates_in_place():
    branches = BRANCHES.replace("GROUPS", "{{0},{1}}").replace("negate", "copy")
    branches = branches.replace(
        "ROOT %k = f32[4]{0} copy(%a.2)", "ROOT %k = f32[4]{0} bitcast(%a.2)"
    )
    places = place("x") | place("r") | place("z", offset=16)
    entry = CHOICE.replace("ROOT ", "") + "\n  ROOT %z = f32[4]{0} add(%y, %y)"
    choices = [np.int32(0), np.int32(1)]
    [result] = run(
        entry, choices, [ROW, 2 * ROW], computations=SUM + branches, devices=2, places=places
    )
    np.testing.assert_array_equal(result, [2 * ROW, 4 * ROW])


# Attention


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 3), (False, 0)])
def test_attention_by_saved_statistics_is_the_derivative_of_the_definition(causal, window):
    rng = np.random.default_rng(0)
    q, dout = (rng.normal(size=(2, 4, 8, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(2, 2, 8, 16)).astype(np.float32) for _ in range(2))
    bias = rng.normal(size=(2, 1, 8, 8)).astype(np.float32)
    places = [(0, slice(0, 5)), (0, slice(5, 8)), (1, slice(0, 8))]
    spans = [Span(row, tokens, tokens, (row, tokens)) for row, tokens in places]
    documents = np.array([[0] * 5 + [1] * 3, [0] * 8])

    def definition(q, k, v):
        group = [jnp.repeat(x, 2, axis=1) for x in (k, v)]
        scores = 0.3 * jnp.einsum("bnth,bnsh->bnts", q, group[0]) + bias
        at, to = jnp.arange(8)[:, None], jnp.arange(8)[None]
        near = (to <= at) if causal else (to == to)
        near = near & (to > at - window) if window else near
        seen = (documents[:, :, None] == documents[:, None]) & near[None]
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), group[1])

    kind = Attention(0.3, causal, window)
    out, lse = forward(kind, spans, (q, k, v), bias, (2, 4, 8))
    with jax.default_matmul_precision("highest"):
        expected, pull = jax.vjp(definition, q, k, v)
        gradients = pull(dout)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for result, gradient in zip(
        backward(kind, spans, (q, k, v), bias, (lse, dout, out)), gradients, strict=True
    ):
        np.testing.assert_allclose(result, gradient, atol=1e-5)
    out, _ = forward(kind, spans[1:], (q, k, v), bias, (2, 4, 8))
    assert np.isnan(out[0, :, :5]).all() and np.isfinite(out[0, :, 5:]).all()
