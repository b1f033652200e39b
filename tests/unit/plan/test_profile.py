"""A profile's report: a trace in the layout of GPUs, computed by hand, and the simulator's own timeline as a trace."""

import dataclasses
import json
import math
import re
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import rich
from jax.profiler import ProfileData

from tests.small_programs import DONE, NODE, NORM, PRODUCT, gather, text_of
from ultrascale_jax.cli import trace_tables
from ultrascale_jax.cli.train import report_profile
from ultrascale_jax.config import AXES, Config, MeshConfig, TrainConfig, UserError
from ultrascale_jax.hlo.classes import ELSEWHERE, block_of, copies_only
from ultrascale_jax.plan.compiled.timeline import COMPUTE, simulate
from ultrascale_jax.plan.profile.breakdown import COLLECTIVE, COPY, WORK, Label, Span, divide
from ultrascale_jax.plan.profile.report import (
    Program,
    make_report,
    measured,
    of_timeline,
    read_report,
    streams_of,
)
from ultrascale_jax.plan.profile.trace import CONTEXT, FOLDER, PROGRAM, read_trace

EIGHT = dict.fromkeys(AXES, 1) | {"fsdp": 8}
MLP = 'metadata={op_name="jit(step)/jvp(layers)/while/body/mlp/dot_general"}'
NAMES = 'metadata={op_name="jit(step)/transpose(jvp(layers))/attention/norm/mul"}'
COPIED = "%c = bf16[8192,8192] copy(%a)"
TEXT = text_of(
    gather(1, 8192), f"{PRODUCT}, {MLP}", DONE.format(1, 0, 8192), f"{NORM}, {NAMES}", COPIED
)
MS = 1_000_000
NUMBERS = count(1)


def xspace(planes):
    """The bytes of a trace: events `(name, start_ns, duration_ns, stats)` by plane and line, as XLA writes."""
    text = []
    for plane, lines in planes.items():
        events = [event for line in lines.values() for event in line]
        names = {name: n for n, name in enumerate(dict.fromkeys(e[0] for e in events), 1)}
        stats = {
            name: n for n, name in enumerate(dict.fromkeys(k for e in events for k in e[3]), 1)
        }
        text.append(f'planes {{ name: "{plane}"')
        text += [
            f'event_metadata {{ key: {n} value {{ id: {n} name: "{k}" }} }}'
            for k, n in names.items()
        ]
        text += [
            f'stat_metadata {{ key: {n} value {{ id: {n} name: "{k}" }} }}'
            for k, n in stats.items()
        ]
        for line, found in lines.items():
            text.append(f'lines {{ name: "{line}" timestamp_ns: 1000')
            for name, start, duration, values in found:
                times = f"offset_ps: {round(start * 1000)} duration_ps: {round(duration * 1000)}"
                text.append(f"events {{ metadata_id: {names[name]} {times}")
                for key, value in values.items():
                    kind = "int64_value" if isinstance(value, int) else "str_value"
                    text.append(
                        f"stats {{ metadata_id: {stats[key]} {kind}: {json.dumps(value)} }}"
                    )
                text.append("}")
            text.append("}")
        text.append("}")
    return ProfileData.text_proto_to_serialized_xspace("\n".join(text))


def kernel(name, start, duration, op, module="m", program=8):
    """An event of a stream of a GPU, with the stats that CUPTI's collector gives it."""
    own = {"correlation_id": next(NUMBERS), "kernel_details": "regs:32 grid:1,1,1 block:128,1,1"}
    if op:
        own |= {"tf_op": "XlaModule:", "hlo_op": op, "hlo_module": module, "program_id": program}
    return name, start, duration, own


def gpu_plane(shift=0.0):
    """Two steps of the program on a GPU, 10 ms each: 3 ms of the gather are exposed, and 1 ms is idle."""
    compute, comm, host = [], [], []
    for begin in (shift, shift + 10 * MS):
        comm.append(
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", begin, 7 * MS, "g1")
        )
        compute += [
            kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", begin, 3 * MS, "y"),
            kernel("void cublasLt::splitKreduce_kernel", begin + 3 * MS, 1 * MS, "y"),
            kernel("loop_add_fusion", begin + 7 * MS, 1.5 * MS, "x"),
            kernel("MemcpyD2D", begin + 8.5 * MS, 0.5 * MS, "c"),
        ]
        host.append(kernel("MemcpyH2D", begin + 1 * MS, 2 * MS, ""))
    # The second step ends a millisecond after its last copy: the program's own end is its last kernel.
    compute.append(kernel("loop_add_fusion", shift + 19 * MS, 1 * MS, "x"))
    return {
        "Stream #13(Kernel,MemcpyD2D)": compute,
        "Stream #21(Kernel)": comm,
        "Stream #24(MemcpyH2D)": host,
        "XLA Ops": [kernel("y", 0, 20 * MS, "y")],
    }


def write_run(folder, trace):
    """The files that a run on 8 H100s with `--profile 10:12` leaves."""
    cfg = Config(mesh=MeshConfig(fsdp=8), train=TrainConfig(global_batch=8))
    (folder / FOLDER / "s").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    (folder / FOLDER / PROGRAM).write_text(TEXT)
    (folder / FOLDER / "s" / "t.xplane.pb").write_bytes(trace)
    context = {"trace": "s/t.xplane.pb", "first": 10, "stop": 12, "process": 0, "platform": "gpu"}
    context |= {"device_kind": NODE.gpu.kind, "mesh": EIGHT}
    (folder / FOLDER / CONTEXT).write_text(json.dumps(context))


def test_a_moment_belongs_to_work_then_to_collectives_then_to_copies_and_else_is_idle():
    product, gather_, norm = (
        Label(WORK, "p", "mlp"),
        Label(COLLECTIVE, "g", "fsdp"),
        Label(WORK, "n", "norm"),
    )
    spans = [
        Span(0.0, 4.0, product),
        Span(3.0, 4.0, norm),
        Span(2.0, 6.0, gather_),
        Span(5.0, 7.0, Label(COPY)),
        Span(8.0, 8.0, norm),
        Span(8.0, 10.0, product),
    ]
    found = divide(spans, 2)
    assert found.step_s == 5.0
    assert found.work_s == {("p", "mlp"): 2.75, ("n", "norm"): 0.25}
    assert (found.exposed_s, found.collective_s) == ({("g", "fsdp"): 1.0}, {("g", "fsdp"): 2.0})
    assert (found.copies_s, found.idle_s) == (0.5, 0.5)
    assert (found.by(0), found.by(1)) == ({"p": 2.75, "n": 0.25}, {"mlp": 2.75, "norm": 0.25})


def test_blocks_are_the_innermost_scopes_of_names():
    program = Program.read(TEXT, EIGHT)
    named = program.module.by_name["main"]
    assert [block_of(program.module, named[i]) for i in "yxc"] == ["mlp", "norm", ELSEWHERE]
    assert copies_only(program.module, named["c"]) and not copies_only(program.module, named["x"])
    assert program.label("h1") == program.label("g1") == Label(COLLECTIVE, "all-gather", "fsdp")
    assert program.label("add") == program.label("x")  # inside of the fusion
    joined = '%x = bf16[8192,8192] fusion(%a), kind=kLoop, calls=%double, metadata={op_name="{0}"}'
    places = {
        "jit(f)/(jvp(embedding)/reshard:jvp(loss)/mul)": "embedding",
        "jit(f)/jvp(layers)/while/body/checkpoint/rematted_computation/moe/BTD,DF->BTF/dot": "moe",
        "jit(f)/jit(normalize)/mul": ELSEWHERE,
    }
    for place, block in places.items():
        module = Program.read(text_of(joined.replace("{0}", place)), EIGHT).module
        assert block_of(module, module.by_name["main"]["x"]) == block


def test_a_trace_of_gpus_is_divided_by_class_block_and_axis_under_the_names_of_the_page(
    tmp_path, capsys
):
    other = kernel("loop_multiply_fusion", 5 * MS, 1 * MS, "fusion", "jit_evaluate", 3)
    late = gpu_plane(shift=100.0)
    late["Stream #13(Kernel,MemcpyD2D)"].insert(3, other)
    write_run(
        tmp_path, xspace({"/device:GPU:0": gpu_plane(), "/device:GPU:1": late, "/device:GPU:2": {}})
    )
    report = make_report(tmp_path)
    assert [d["name"] for d in report["devices"]] == ["GPU:0", "GPU:1"]
    found = report["measured"]
    assert found["step_s"] == pytest.approx(10e-3)
    kernels = {
        "matrix products": 4e-3,
        "elementwise": 2e-3,
        "copies": 0.5e-3,
        "other programs": 0.25e-3,
    }
    assert found["kernels_s"] == pytest.approx(kernels)
    blocks = {"mlp": 4e-3, "norm": 2e-3, ELSEWHERE: 0.75e-3}
    assert found["blocks_s"] == pytest.approx(blocks)
    assert found["exposed_s"] == pytest.approx({"fsdp": 3e-3 - 0.25e-3})
    [collective] = found["collectives"]
    assert (collective["kind"], collective["total_s"]) == ("all-gather", pytest.approx(7e-3))
    assert found["waiting_for_copies_s"] == 0.0 and found["idle_s"] == pytest.approx(0.5e-3)
    assert report["predicted"] and report["predicted_for"] == "h100"
    assert (
        read_report(tmp_path)
        == report
        == json.loads((tmp_path / FOLDER / "report.json").read_text())
    )
    rich.print(trace_tables.tables(report))
    shown = capsys.readouterr().out
    assert "exposed communication, fsdp" in shown and "a step of 2 (10 to 11)" in shown
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    section = page.partition("## Profiles")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == report.keys() | found.keys()


def test_kernels_without_an_instruction_are_told_apart_by_their_names():
    program = Program.read(TEXT, EIGHT)
    events = [
        kernel("loop_add_fusion", 0, 1 * MS, "x"),
        kernel("ncclDevKernel_AllReduce", 1 * MS, 1 * MS, ""),
        kernel("MemcpyD2H", 2 * MS, 1 * MS, ""),
        kernel("loop_add_fusion", 3 * MS, 1 * MS, "no-such-instruction"),
        kernel("some_kernel", 4 * MS, 1 * MS, ""),
        kernel("loop_add_fusion", 5 * MS, 1 * MS, "x"),
    ]
    devices = read_trace(xspace({"/device:GPU:0": {"Stream #1(Kernel)": events}}))
    [found] = measured(program, "m", devices, 1).values()
    assert found.by(0) == pytest.approx({"elementwise": 2e-3, "unnamed": 2e-3})
    assert found.exposed_s == pytest.approx({("unknown", "unknown"): 1e-3})
    assert found.copies_s == pytest.approx(1e-3)


def test_the_simulators_timeline_as_a_trace_gives_its_own_prediction():
    longer = gather(1, 65536), f"{PRODUCT}, {MLP}", DONE.format(1, 0, 65536), f"{NORM}, {NAMES}"
    program = Program.read(text_of(*longer, gathered=65536), EIGHT)
    timeline = simulate(program.module, EIGHT, NODE)
    streams = {name: f"Stream #{n}(Kernel)" for n, name in enumerate(timeline.streams)}
    lines = {
        streams[name]: [
            kernel(event.name, event.start_s * 1e9, event.duration_s * 1e9, event.name)
            for event in events
        ]
        for name, events in timeline.streams.items()
    }
    assert COMPUTE in timeline.streams and len(streams) == 2
    devices = read_trace(xspace({"/device:GPU:0": lines}))
    [found] = measured(program, "m", devices, 1).values()
    expected = of_timeline(timeline)
    assert streams_of(program, devices) == {"g1": 1} and expected.exposed_s
    for field in dataclasses.fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9), field.name
    for part in (found, expected):
        parts = Counter(part.work_s) + Counter(part.exposed_s)
        whole = math.fsum(parts.values()) + part.copies_s + part.idle_s
        assert whole == pytest.approx(part.step_s)


@pytest.mark.parametrize(
    ("trace", "fault"),
    [
        (b"no protobuf at all", "no XSpace protobuf"),
        (b"", "shows no device at work"),
        (
            xspace({"/device:GPU:0": {"Stream #1": [kernel("k", 0, 1, "x", "jit_f")]}}),
            "does not show this program, but jit_f",
        ),
        (None, "is missing; trace again"),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_line_of_a_run(tmp_path, capsys, trace, fault):
    write_run(tmp_path, trace or b"")
    if trace is None:
        (tmp_path / FOLDER / "s" / "t.xplane.pb").unlink()
    with pytest.raises(UserError, match=fault):
        make_report(tmp_path)
    report_profile(str(tmp_path))
    assert capsys.readouterr().out.count("\n") == 1
