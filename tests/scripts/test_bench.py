"""The benchmark measures what it says, and bare JAX computes the same model."""

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

from scripts.bench import __main__ as bench
from scripts.bench import bare_jax, child, kernels, trainers
from scripts.bench.report import Report, figures
from tests.states import some_state
from ultrascale_jax.cli import command_line
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.plan.flops import flops_per_token
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step import step as train_step

ENVIRON = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def command(path, *options):
    return [sys.executable, "-m", "scripts.bench", "--tiny", "--out", str(path), *options]


def config_of(part):
    return command_line.parse(part.spec["arguments"], prog="bench")[0]


@pytest.fixture
def peer_cfg():
    (part,) = bench.peer_parts(tiny=True)
    return config_of(part).check(1)


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [pytest.param(False, marks=pytest.mark.wide), True])
def test_bare_jax_has_the_loss_and_the_gradients_of_this_projects_model(peer_cfg, unrolled):
    cfg = peer_cfg
    mesh = make_mesh(cfg.mesh, jax.devices()[:1])
    shape = (cfg.train.global_batch, cfg.data.seq_len + 1)
    rows = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, np.int32)
    positions = np.broadcast_to(np.arange(cfg.data.seq_len, dtype=np.int32), rows[:, 1:].shape)
    arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "positions": positions}
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        batch = jax.device_put(arrays, jax.NamedSharding(mesh, act("BT")))
        weight = jnp.float32(1 / rows[:, 1:].size)
        step = jax.jit(lambda params: train_step.gradients(cfg, params, batch, weight))
        gradients, sums = step(state.params)

    def arrays_of(model):
        """Return the arrays by the names of bare JAX."""
        arrays = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        (stack,) = arrays.pop("stacks").values()
        return arrays | {"blocks": stack}

    ours, ours_grads = arrays_of(state.params), arrays_of(gradients)
    with jax.numpy_rank_promotion("allow"):
        peer_loss, peer_grads = jax.jit(
            jax.value_and_grad(
                lambda params: bare_jax.loss_fn(
                    params, rows[:, :-1], rows[:, 1:], dataclasses.asdict(cfg.model), unrolled
                )
            )
        )(ours)
    np.testing.assert_allclose(peer_loss, sums.loss, rtol=1e-6)
    assert len(jax.tree.leaves(ours)) == 12
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), dict(peer_grads), ours_grads
    )


@pytest.mark.wide
def test_the_peer_suite_times_every_trainer(tmp_path):
    path = tmp_path / "peer.json"
    done = subprocess.run(command(path, "--steps", "3"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(path.read_text())
    assert report["complete"] and report["command"].startswith("python -m scripts.bench --tiny")
    rows = {row["contestant"]: row for row in report["results"]}
    assert list(rows) == ["ultrascale_jax, remat dots", "bare JAX, scanned", "bare JAX, unrolled"]
    for name, row in rows.items():
        assert row["status"] == "measured" and row["num_steps"] == 3
        assert 0 < row["step_s"]["p10"] <= row["step_s"]["median"] <= row["step_s"]["p90"]
        assert row["tokens_per_cpu_s"] > 0 and row["peak_gb"] > 0.001 and row["compile_s"] > 0
        assert row["loss"] == pytest.approx(np.log(256), abs=0.3)
        assert "mfu" not in row  # the peak of a CPU is not known
        assert name in done.stdout
    assert report["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("suite", ["gpu", "kernels"])
def test_parts_that_have_no_time_are_skipped_with_the_reason(tmp_path, suite):
    path = tmp_path / "out.json"
    bench.main([suite, "--minutes", "1e-9", "--out", str(path)])
    report = json.loads(path.read_text())
    assert report["complete"] and len(report["results"]) == {"gpu": 6, "kernels": 17}[suite]
    assert {row["status"] for row in report["results"]} == {"skipped"}
    assert len({(row["workload"], row["contestant"]) for row in report["results"]}) == len(
        report["results"]
    )
    assert {row["reason"] for row in report["results"]} == {"the benchmark's time was over"}


@pytest.mark.parametrize("suite", ["gpu", "kernels"])
def test_without_a_gpu_a_part_says_so(suite):
    part = next(bench.SUITES[suite](False))
    spec = part.spec | {"workload": "", "steps": 1, "roofline": {}}
    module = {"trainers": trainers, "kernels": kernels}[part.module]
    with pytest.raises(child.Unavailable, match="JAX sees no GPU, only cpu"):
        module.measure(json.loads(json.dumps(spec)))


def test_a_kernels_programs_have_rates_beside_the_roofline_and_errors():
    def measured(kernel, shape, **rates):
        spec = bench.kernel_part(kernel, "tiny", shape, True).spec
        return kernels.measure(spec | {"workload": "tiny", "steps": 2, "roofline": rates})

    roofline = {row["workload"]: row for row in measured("roofline", (64,))}
    for name in (kernels.BF16, kernels.FP8):
        row = roofline[f"tiny: {name}"]
        assert row["tflops_per_device"] == pytest.approx(2 * 64**3 / row["step_s"]["median"] / 1e12)
    M, D = bench.KERNEL_SHAPES["norm"]["tiny"]
    (row,) = measured("norm", (M, D), copy=2e9)
    assert (row["workload"], row["contestant"], row["relative"]) == ("tiny: norm", "xla", 1)
    rate = 5 * 2 * M * D / row["step_s"]["median"]
    assert row["gb_per_s"] == pytest.approx(rate / 1e9) and row["num_steps"] == 2
    assert row["of_roofline"] == pytest.approx(rate / 2e9)
    assert row["error"] == 0  # beside itself


@pytest.mark.slow
@pytest.mark.wide
def test_the_suite_kernels_runs_without_a_gpu_by_xla(tmp_path):
    path = tmp_path / "kernels.json"
    bench.main(["kernels", "--tiny", "--steps", "1", "--out", str(path)])
    rows = json.loads(path.read_text())["results"]
    assert {row["status"] for row in rows} == {"measured"}
    assert len(rows) == 9 and all("of_roofline" in row for row in rows[3:])


# Implied by tests/kernels, which compile these kernels for H100s.
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("model", bench.KERNEL_MODELS)
@pytest.mark.parametrize("kernel", list(bench.KERNEL_SHAPES))
def test_on_an_h100_our_kernels_take_the_shapes_that_are_timed(kernel, model):
    spec = bench.kernel_part(kernel, model, bench.KERNEL_SHAPES[kernel][model], False).spec
    mesh = jax.sharding.Mesh(np.array(target_devices(1)), ("one",))
    ours = [case for case, name in kernels.programs(spec) if name == kernels.MOSAIC]
    assert ours
    with jax.set_mesh(mesh):
        for case in ours:
            make = functools.partial(case.check.make, dtype=jnp.bfloat16)
            arguments = jax.eval_shape(lambda make=make: make(jax.random.key(0)))
            run = functools.partial(case.check.run, kernels.MOSAIC)
            assert "Ref<gmem>" in str(jax.make_jaxpr(run)(*arguments))


def test_the_kernel_takes_the_experts_that_are_timed_on_a_gpu():
    for rows, _, d_model, d_ff in bench.GROUPED_GEMMS.values():
        assert rows % 8 == d_model % 128 == d_ff % 128 == 0


@pytest.mark.wide
def test_an_interrupt_keeps_the_rows_that_are_measured(tmp_path):
    path = tmp_path / "gpu.json"
    # A job in the background inherits that interrupts are ignored; a terminal's user has them.
    listen = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}; runpy.run_module('scripts.bench', run_name='__main__')"
    arguments = command(path, "--suite", "kernels", "--steps", "2")
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
    assert not report["complete"] and len(report["results"]) < 9
    assert [row["status"] for row in report["results"][:3]] == ["measured"] * 3
    assert report["results"][-1] | {"status": "skipped"} == report["results"][-1]
    assert b"bf16 GEMM" in output


def test_a_part_that_fails_is_reported_with_its_error():
    with pytest.raises(child.Failed, match="KeyError: 'arguments'") as failure:
        child.run("scripts.bench.trainers", {}, ENVIRON, 60)
    assert not failure.value.out_of_memory
    with pytest.raises(child.Failed, match=r"ended with code 1: .*No module named"):
        child.run("scripts.bench.nobody", {}, ENVIRON, 60)
    assert child.Failed("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while").out_of_memory


def test_a_part_is_stopped_when_its_time_is_up():
    with pytest.raises(child.Unavailable, match="time was up"):
        child.run("scripts.bench.trainers", {}, ENVIRON, 0.1)


def test_figures_are_of_the_median_step_and_mfu_needs_a_known_peak(peer_cfg):
    tokens = peer_cfg.train.global_batch * peer_cfg.data.seq_len
    row = figures(peer_cfg, {"device": "cpu"}, [0.1, 0.2, 0.9], [0.4, 0.5], 2_000_000_000)
    assert row["step_s"] == {"median": 0.2, "p10": pytest.approx(0.12), "p90": pytest.approx(0.76)}
    assert row["tokens_per_s"] == tokens / 0.2
    assert row["tokens_per_cpu_s"] == pytest.approx(tokens / 0.45)
    assert row["peak_gb"] == 2.0 and "mfu" not in row
    bf16 = config_of(next(bench.gpu_parts(tiny=False)))
    row = figures(bf16, {"device": "NVIDIA H100 80GB HBM3"}, [0.25], [], 1)
    flops = bf16.train.global_batch * 4096 * flops_per_token(bf16.model, 4096)
    assert row["mfu"] == pytest.approx(flops / 0.25 / 989.4e12)
    assert "tokens_per_cpu_s" not in row and row["step_s"]["p10"] == 0.25


def test_the_gpu_suite_trains_the_same_tokens_at_each_length():
    configs = [config_of(part) for part in bench.gpu_parts(tiny=False)]
    assert {cfg.train.global_batch * cfg.data.seq_len for cfg in configs} == {bench.GPU_TOKENS}
    assert {(cfg.train.precision, cfg.data.document_mask) for cfg in configs} == {("bf16", False)}
    lengths = [(cfg.data.seq_len, cfg.train.remat) for cfg in configs]
    assert lengths == [(n, remat) for n in (4096, 8192) for remat in bench.REMAT]


def test_a_pinned_process_sees_one_core_and_the_parent_keeps_its_own():
    before = os.sched_getaffinity(0)
    with child.one_core() as core:
        code = "import os; print(os.sched_getaffinity(0))"
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert seen.stdout.strip() == str({core})
    assert os.sched_getaffinity(0) == before


def test_pipelined_steps_are_dispatched_one_ahead_and_all_waited_for(monkeypatch):
    log = []
    count = iter(range(10))

    def step():
        log.append(("step", n := next(count)))
        return n

    monkeypatch.setattr(jax, "block_until_ready", lambda n: log.append(("wait", n)))
    times = trainers.pipelined(step, 3)
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
