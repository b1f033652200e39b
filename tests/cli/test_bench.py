"""The benchmark measures what it says, and its peers compute the same model."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.states import some_state
from ultrascale_jax.cli import bench
from ultrascale_jax.cli.bench_peers import bare_jax, turns, works
from ultrascale_jax.cli.bench_peers.contestant import pipelined
from ultrascale_jax.cli.bench_peers.report import Report, figures
from ultrascale_jax.cli.bench_peers.runner import Failed, OutOfTime, Process, one_core
from ultrascale_jax.configs.shapes import LLAMA3_8B
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.step import loss_and_gradients
from ultrascale_jax.training.flops import flops_per_token

PARTS = bench.peer_parts(tiny=True)
ENVIRON = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def command(path, *options):
    return [sys.executable, "-m", "scripts.bench", "--tiny", "--out", str(path), *options]


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [pytest.param(False, marks=pytest.mark.wide), True])
def test_bare_jax_has_the_loss_and_the_gradients_of_this_projects_model(unrolled):
    cfg = PARTS[0].cfg.check(1)
    mesh = make_mesh(cfg.mesh, jax.devices()[:1])
    shape = (cfg.train.global_batch, cfg.data.seq_len + 1)
    rows = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, np.int32)
    positions = np.broadcast_to(np.arange(cfg.data.seq_len, dtype=np.int32), rows[:, 1:].shape)
    arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "positions": positions}
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        batch = jax.device_put(arrays, jax.NamedSharding(mesh, act("BT")))
        weight = jnp.float32(1 / rows[:, 1:].size)
        step = jax.jit(lambda params: loss_and_gradients(cfg, params, batch, weight))
        loss, gradients, _ = step(state.params)
    ours, ours_grads = (
        jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree)))
        for tree in (state.params, gradients)
    )
    with jax.numpy_rank_promotion("allow"):
        peer_loss, peer_grads = jax.jit(
            jax.value_and_grad(
                lambda params: bare_jax.loss_fn(
                    params, rows[:, :-1], rows[:, 1:], dataclasses.asdict(cfg.model), unrolled
                )
            )
        )(ours)
    np.testing.assert_allclose(peer_loss, loss, rtol=1e-6)
    assert len(jax.tree.leaves(ours)) == 12
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), dict(peer_grads), ours_grads
    )


@pytest.mark.wide
def test_the_peer_suite_times_every_contestant_and_skips_what_is_not_installed(tmp_path):
    path = tmp_path / "peer.json"
    done = subprocess.run(command(path, "--steps", "3"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(path.read_text())
    assert report["complete"] and report["command"].startswith("ultrascale bench --tiny")
    rows = {row["contestant"]: row for row in report["results"]}
    for name in ("ultrascale_jax", "bare JAX, scanned", "bare JAX, unrolled"):
        row = rows[name]
        assert row["status"] == "measured" and row["num_steps"] == 3
        assert 0 < row["step_s"]["p10"] <= row["step_s"]["median"] <= row["step_s"]["p90"]
        assert row["tokens_per_cpu_s"] > 0 and row["peak_gb"] > 0.05
        assert 0 < row["compile_s"] < row["first_step_s"]
        assert row["loss"] == pytest.approx(np.log(256), abs=0.3)
        assert "mfu" not in row  # the peak of a CPU is not known
        assert row["versions"]["jax"] == jax.__version__
        assert name in done.stdout
    assert rows["PyTorch, eager"]["status"] in ("measured", "skipped")
    assert rows[bench.FIRST_STEP]["first_step_s"] > 1
    assert report["goals"] == []


@pytest.mark.slow
def test_without_a_gpu_the_gpu_suite_skips_its_parts_and_says_why(tmp_path):
    path = tmp_path / "gpu.json"
    arguments = ["--suite", "gpu", "--minutes", "0.0001", "--out", str(path)]
    bench.main(arguments)
    report = json.loads(path.read_text())
    assert report["complete"]
    assert {row["status"] for row in report["results"]} == {"skipped"}
    assert all(row["reason"] for row in report["results"])
    names = {row["contestant"] for row in report["results"]}
    ours = {f"ultrascale_jax, remat {remat}" for remat in bench.REMAT}
    assert names == {"PyTorch", *ours, "all of its programs"}

    for part in (
        bench.gpu_part(4096, "none", tiny=False),
        bench.attention_part(8192, tiny=False),
        bench.grouped_gemm_part("Mixtral 8x7B, 8 experts", tiny=False),
    ):
        deadline = time.monotonic() + 60
        with Process(
            part.module, json.dumps(part.spec), environ=ENVIRON, deadline=deadline
        ) as process:
            with pytest.raises(bench.Unavailable, match="JAX sees no GPU, only cpu"):
                process.ready()


@pytest.mark.wide
def test_attentions_programs_take_turns_and_each_has_a_row(tmp_path):
    options = bench.Options(suite="gpu", tiny=True, steps=2)
    report = Report(tmp_path / "gpu.json", "gpu", [])
    part = bench.attention_part(64, tiny=True)
    bench.Bench(options, report)._in_turns(part)
    whole, *rows = report.rows
    assert {row["status"] for row in report.rows} == {"measured"}, whole
    assert whole["compile_s"] > 0 and whole["peak_gb"] > 0.05 and "loss" not in whole
    assert [(row["workload"].rpartition(": ")[2], row["contestant"]) for row in rows] == [
        (program.work, program.contestant) for _, program in turns.programs(part.spec)
    ]
    products = {"forward": 2, "forward and backward": 7, "block, forward": 2, "block, backward": 5}
    for row in rows:
        assert row["num_steps"] == 2 and row["step_s"]["median"] > 0
        # 4 heads of 16 over half of 64 x 64 scores.
        work = row["workload"].rpartition(": ")[2]
        operations = products[work] * 2 * 4 * 16 * 64 * 64 / 2
        assert row["tflops_per_device"] == pytest.approx(
            operations / row["step_s"]["median"] / 1e12
        )
    first = [row["relative"] for row in rows if row["contestant"] in ("jax.nn", "one causal")]
    assert first == [1] * 4
    assert report.goals == []


# Implied by kernels/test_attention.py.
@pytest.mark.wide
@pytest.mark.slow
def test_attentions_programs_compute_what_their_names_say():
    found, arguments = {}, {}
    with jax.set_mesh(works.one_rank()):
        for work, program in turns.programs(bench.attention_part(64, tiny=True).spec):
            key = program.work, program.contestant
            given = turns.prepared(work, program.contestant, work.make(jax.random.key(0)))
            arguments[key] = given
            found[key] = jax.jit(functools.partial(work.run, program.contestant))(*given)

    def same(got, want):
        want = np.asarray(want, np.float32)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want, atol=0.02 * np.abs(want).max(), rtol=0
        )

    both, backward = "forward and backward", "block, backward"
    out, *gradients = found[both, "jax.nn"]
    for name in works.RING:
        same(found["forward", name], out)
        jax.tree.map(same, found[both, name], (out, *gradients))
    same(found["block, forward", "one causal"][0][0], out)
    jax.tree.map(same, found[backward, "one causal"][0], tuple(gradients))
    for i in range(2):
        q, k, v, dout = arguments[backward, "two halves"][i][:4]
        assert q.shape[1] == k.shape[1] == 32
        out, pull_back = jax.vjp(jax.nn.dot_product_attention, q, k, v)
        same(found["block, forward", "two halves"][i][0], out)
        jax.tree.map(same, found[backward, "two halves"][i], pull_back(dout))


def test_attention_is_timed_with_the_heads_of_llama_3_8b():
    specs = [bench.attention_part(n, tiny=False).spec for n in bench.ATTENTION_TOKENS]
    names = ("num_heads", "num_kv_heads", "head_dim")
    heads = tuple(getattr(LLAMA3_8B, name) for name in names)
    for spec in specs:
        assert spec["shape"][1:] == heads and spec["needs_gpu"]
    assert len({spec["calls"] * turns.programs(spec)[1][1].amount for spec in specs}) == 1


@pytest.mark.slow
def test_the_products_of_experts_take_turns_and_each_has_a_row(tmp_path):
    options = bench.Options(suite="gpu", tiny=True, steps=2)
    report = Report(tmp_path / "gpu.json", "gpu", [])
    name, *_ = bench.GROUPED_GEMMS
    part = bench.grouped_gemm_part(name, tiny=True)
    bench.Bench(options, report)._in_turns(part)
    whole, *rows = report.rows
    assert {row["status"] for row in report.rows} == {"measured"}, whole
    # Both do the same: gradients too, in bfloat16.
    assert all(row["error"] < 0.02 for row in rows)
    assert [(row["workload"].rpartition(": ")[2], row["contestant"]) for row in rows] == [
        (program.work, program.contestant) for _, program in turns.programs(part.spec)
    ]
    for row in rows:
        operations = 2 * 512 * 64 * 32
        assert row["tflops_per_device"] == pytest.approx(
            operations / row["step_s"]["median"] / 1e12
        )
    assert report.goals == []


def test_the_kernel_takes_the_experts_that_are_timed_on_a_gpu_and_has_goals():
    for name in bench.GROUPED_GEMMS:
        spec = bench.grouped_gemm_part(name, tiny=False).spec
        rows, _, d_model, d_ff = spec["shape"]
        assert rows % 8 == d_model % 128 == d_ff % 128 == 0
        contestants = {program.contestant for _, program in turns.programs(spec)}
        assert contestants == {works.KERNEL, works.PADDED, works.RAGGED}


def measured(tmp_path, *parts):
    """The report of these parts of the suite `kernels`."""
    options = bench.Options(suite="kernels", tiny=True, steps=2)
    report = Report(tmp_path / "kernels.json", "kernels", [])
    running = bench.Bench(options, report)
    for part in parts:
        running._in_turns(part)
    return report


@pytest.mark.wide
def test_a_kernels_programs_have_rates_beside_the_roofline_and_errors(tmp_path):
    M, D = bench.KERNEL_SHAPES["rms_norm"]["tiny"]
    report = measured(
        tmp_path,
        bench.kernel_part("roofline", "this CPU", (64,), True),
        bench.kernel_part("rms_norm", "tiny", (M, D), True),
    )
    assert {row["status"] for row in report.rows} == {"measured"}, report.rows
    rows = {row["workload"]: row for row in report.rows}
    roofline = rows["this CPU: copy"]["gb_per_s"]
    for name in (works.BF16, works.FP8):
        row = rows[f"this CPU: {name}"]
        assert row["tflops_per_device"] == pytest.approx(2 * 64**3 / row["step_s"]["median"] / 1e12)
    row = rows["tiny: rms_norm, backward"]
    assert row["contestant"] == works.XLA and row["relative"] == 1
    rate = 3 * 2 * M * D / row["step_s"]["median"] / 1e9
    assert row["gb_per_s"] == pytest.approx(rate)
    assert row["of_roofline"] == pytest.approx(rate / roofline)
    assert 1e-4 < row["error"] < 4e-3  # bfloat16 beside float32
    assert report.goals == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=() if kernel == "linear_cross_entropy" else pytest.mark.wide)
        for kernel in bench.KERNEL_SHAPES
    ],
)
def test_every_kernels_programs_run_without_a_gpu_by_xla(tmp_path, kernel):
    part = bench.kernel_part(kernel, "tiny", bench.KERNEL_SHAPES[kernel]["tiny"], True)
    whole, *rows = measured(tmp_path, part).rows
    assert whole["status"] == "measured", whole
    assert [row["workload"] for row in rows] == [
        f"tiny: {work.name}" for work in turns.works(part.spec)
    ]
    assert all(0 <= row["error"] < 4e-3 for row in rows)


def test_without_a_gpu_a_kernel_is_skipped_with_the_reason(tmp_path):
    part = bench.kernel_part("roofline", "this GPU", (64,), False)
    (row,) = measured(tmp_path, part).rows
    assert (row["status"], row["reason"]) == ("skipped", "JAX sees no GPU, only cpu")


# Implied by tests/kernels, which compile these kernels for H100s.
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("model", bench.KERNEL_MODELS)
@pytest.mark.parametrize("kernel", list(bench.KERNEL_SHAPES))
def test_on_an_h100_our_kernels_take_the_shapes_that_are_timed(kernel, model):
    spec = bench.kernel_part(kernel, model, bench.KERNEL_SHAPES[kernel][model], False).spec
    programs = turns.programs(spec)
    assert len({program.work for _, program in programs}) == len(turns.works(spec))
    mesh = jax.sharding.Mesh(np.array(target_devices(1)), ("one",))
    with jax.set_mesh(mesh):
        for work in turns.works(spec):
            assert works.MOSAIC in work.contestants[1:]
            given = jax.eval_shape(lambda work=work: work.make(jax.random.key(0)))
            if work.prepare is not None:
                given = jax.eval_shape(functools.partial(work.prepare, works.MOSAIC), *given)
            text = str(jax.make_jaxpr(functools.partial(work.run, works.MOSAIC))(*given))
            assert "Ref<gmem>" in text


def test_goals_are_at_least_or_at_most(tmp_path):
    report = Report(tmp_path / "kernels.json", "kernels", [])
    running = bench.Bench(bench.Options(suite="kernels"), report)
    row = {"of_roofline": 0.9, "relative": 0.7, "tflops_per_device": 600, "temporary_gb": 0.4}
    for work in (
        *("rms_norm, backward", "quantize_fp8, tile", works.LOSS),
        "attention, causal, forward",
    ):
        running._add_goals(row | {"workload": f"model: {work}", "contestant": works.MOSAIC})
        running._add_goals(row | {"workload": f"model: {work}", "contestant": works.XLA})
    (name, *_), ring = bench.GROUPED_GEMMS, {"relative": 1.1, "contestant": "ring_attention"}
    for work in ("forward", "input gradient", "weight gradient"):
        place = f"{bench.grouped_gemm_part(name, tiny=False).workload}: {work}"
        running._add_goals(row | {"workload": place, "contestant": works.KERNEL})
    for work in ("forward and backward", "block, forward"):
        place = f"{bench.attention_part(8192, tiny=False).workload}: {work}"
        running._add_goals(ring | {"workload": place})
        running._add_goals(ring | {"workload": place, "contestant": works.DIRECT})
    assert [(goal["goal"], goal["met"]) for goal in report.goals] == [
        ("model: rms_norm, backward: mosaic: of_roofline, at least 0.85", True),
        ("model: rms_norm, backward: mosaic: relative, at most 0.667", False),
        ("model: quantize_fp8, tile: mosaic: of_roofline, at least 0.8", True),
        (f"model: {works.LOSS}: mosaic: tflops_per_device, at least 620", False),
        (f"model: {works.LOSS}: mosaic: temporary_gb, at most 1", True),
        ("model: attention, causal, forward: mosaic: relative, at most 1", True),
        *(
            (f"experts, {name}: {work}: {works.KERNEL}: tflops_per_device, {goal}", True)
            for work, goal in (("forward", "at least 400"), ("weight gradient", "at least 450"))
        ),
        (
            "attention, sequence 8192: forward and backward: ring_attention: relative, at most 1.02",
            False,
        ),
    ]


@pytest.mark.wide
def test_an_interrupt_keeps_what_is_measured(tmp_path):
    path = tmp_path / "gpu.json"
    # A job in the background inherits that interrupts are ignored; a terminal's user has them.
    listen = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}; runpy.run_module('scripts.bench', run_name='__main__')"
    arguments = command(path, "--suite", "gpu", "--steps", "2")
    process = subprocess.Popen([sys.executable, "-c", code, *arguments[3:]], stdout=subprocess.PIPE)
    while process.poll() is None:
        time.sleep(0.1)
        rows = json.loads(path.read_text())["results"] if path.exists() else []
        if any(row["status"] == "measured" for row in rows):
            process.send_signal(signal.SIGINT)
            break
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(path.read_text())
    assert not report["complete"]
    assert report["results"][0]["status"] == "measured"
    assert report["results"][-1] | {"status": "skipped"} == report["results"][-1]
    assert len(report["results"]) < 8
    assert b"ultrascale_jax, remat none" in output


def test_a_contestant_that_fails_is_reported_with_its_last_words_and_fails_the_benchmark(tmp_path):
    deadline = time.monotonic() + 60
    with Process(bench.BARE, "{}", environ=ENVIRON, deadline=deadline) as process:
        with pytest.raises(Failed, match="KeyError: 'model'") as failure:
            process.ready()
    assert not failure.value.out_of_memory
    with Process(
        "ultrascale_jax.cli.bench_peers.nobody", environ=ENVIRON, deadline=deadline
    ) as process:
        with pytest.raises(Failed, match=r"ended with code 1: .*No module named"):
            process.ready()
    assert Failed("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while ...").out_of_memory
    assert Failed("OutOfMemoryError: CUDA out of memory. Tried to ...").out_of_memory


def test_a_contestant_is_stopped_when_time_is_up():
    begun = time.monotonic()
    spec = json.dumps(PARTS[1].spec)
    with Process(bench.BARE, spec, environ=ENVIRON, deadline=begun + 0.2) as process:
        with pytest.raises(OutOfTime):
            process.ready()


def test_figures_are_of_the_median_step_and_mfu_needs_a_known_peak():
    cfg = PARTS[0].cfg
    tokens = cfg.train.global_batch * cfg.data.seq_len
    row = figures(cfg, {"device": "cpu"}, [0.1, 0.2, 0.9], [0.4, 0.5], 2_000_000_000)
    assert row["step_s"] == {"median": 0.2, "p10": pytest.approx(0.12), "p90": pytest.approx(0.76)}
    assert row["tokens_per_s"] == tokens / 0.2
    assert row["tokens_per_cpu_s"] == pytest.approx(tokens / 0.45)
    assert row["peak_gb"] == 2.0 and "mfu" not in row
    bf16 = bench.gpu_part(4096, "full", tiny=False).cfg
    row = figures(bf16, {"device": "NVIDIA H100 80GB HBM3"}, [0.25], [], 1)
    flops = bf16.train.global_batch * 4096 * flops_per_token(bf16.model, 4096)
    assert row["mfu"] == pytest.approx(flops / 0.25 / 989.4e12)
    assert "tokens_per_cpu_s" not in row and row["step_s"]["p10"] == 0.25


def test_both_sides_of_the_gpu_suite_train_the_same_shape_on_the_same_tokens():
    for seq_len in (4096, 8192):
        ours = bench.gpu_part(seq_len, "none", tiny=False)
        torch = bench.gpu_torch_part(seq_len, {}, tiny=False)
        cfg = ours.cfg
        assert cfg.train.global_batch * seq_len == bench.GPU_TOKENS
        assert cfg.train.precision == torch.spec["precision"] == "bf16"
        assert not cfg.data.document_mask and cfg.model.d_model == 2048
        assert torch.spec["model"] == dataclasses.asdict(cfg.model)
        assert (torch.spec["batch"], torch.spec["seq_len"]) == (cfg.train.global_batch, seq_len)
        assert torch.spec["compile"] and torch.spec["needs_gpu"] and ours.spec["needs_gpu"]


def test_a_pinned_process_sees_one_core_and_the_parent_keeps_its_own():
    before = os.sched_getaffinity(0)
    with one_core() as core:
        code = "import os; print(os.sched_getaffinity(0))"
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert seen.stdout.strip() == str({core})
    assert os.sched_getaffinity(0) == before


def test_pipelined_steps_are_dispatched_one_ahead_and_all_waited_for():
    log = []
    count = iter(range(10))

    def step():
        log.append(("step", n := next(count)))
        return n

    times = pipelined(step, lambda n: log.append(("wait", n)), 3)
    assert len(times) == 3
    assert log == [("step", 0), ("step", 1), ("wait", 0), ("step", 2), ("wait", 1), ("wait", 2)]


def test_the_report_is_on_disk_after_every_row(tmp_path):
    path = tmp_path / "a" / "b.json"
    report = Report(path, "peer", ["python", "-m", "scripts.bench"])
    assert json.loads(path.read_text())["results"] == []
    report.add("work", "someone", status="skipped", reason="because")
    report.goal("speed", 2.0, True)
    saved = json.loads(path.read_text())
    expected = {"workload": "work", "contestant": "someone", "status": "skipped"}
    assert saved["results"] == [expected | {"reason": "because"}]
    assert saved["goals"] == [{"goal": "speed", "value": 2.0, "met": True}]
    assert not saved["complete"] and saved["machine"]["cores"] == os.cpu_count()
    assert set(saved) >= {"command", "date", "versions"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps=0: must be at least 1"),
        (["--minutes", "0"], "must be positive"),
        (["kernels", "--steps", "0"], "steps=0: must be at least 1"),
        (["nothing"], "--suite"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
