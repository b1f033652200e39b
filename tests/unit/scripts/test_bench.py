"""The benchmark measures what it says."""

import json

import pytest

from scripts.bench import __main__ as bench
from scripts.bench import kernels
from scripts.bench.report import figures
from ultrascale_jax.cli import command_line
from ultrascale_jax.plan.flops import flops_per_token

ENVIRON = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def config_of(part):
    return command_line.parse(part.spec["arguments"], prog="bench")[0]


@pytest.fixture
def peer_cfg():
    (part,) = bench.peer_parts(tiny=True)
    return config_of(part).check(1)


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
