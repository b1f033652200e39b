"""Only what an instruction reads or writes counts as its traffic, on the device and over the link to the host."""

import pytest

from ultrascale_jax.hlo import parse
from ultrascale_jax.hlo.memory_traffic import touched

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
