"""The benchmark of kernels measures what it says, and a part that fails has its reason."""

import json

import pytest

from scripts.bench import __main__ as bench
from scripts.bench import kernels


def test_a_kernels_programs_have_rates_beside_the_roofline_and_errors():
    parts = {part.kernel: part for part in kernels.parts(tiny=True)}
    roofline = {row["workload"]: row for row in kernels.measure(parts["roofline"], 2, True, {})}
    for name in (kernels.BF16, kernels.FP8):
        row = roofline[f"tiny: {name}"]
        assert row["tflops_per_device"] == pytest.approx(2 * 64**3 / row["step_s"]["median"] / 1e12)
    M, D = parts["norm"].shape
    (row,) = kernels.measure(parts["norm"], 2, True, {"copy": 2e9})
    assert (row["workload"], row["contestant"], row["relative"]) == ("tiny: norm", "xla", 1)
    rate = 5 * 2 * M * D / row["step_s"]["median"]
    assert row["gb_per_s"] == pytest.approx(rate / 1e9) and row["num_steps"] == 2
    assert row["of_roofline"] == pytest.approx(rate / 2e9)
    assert row["error"] == 0  # beside itself


def test_a_part_that_fails_has_a_row_with_the_reason(tmp_path, monkeypatch):
    def measured(environ, measure, part, *arguments):
        if part.kernel == "loss":
            raise RuntimeError("RESOURCE_EXHAUSTED: too large")
        return [{"workload": part.workload, "contestant": "xla"}]

    monkeypatch.setattr(bench, "in_process", measured)
    path = tmp_path / "out.json"
    assert bench.main(["kernels", "--tiny", "--out", str(path)]) == 1
    rows = json.loads(path.read_text())["results"]
    reasons = {row["contestant"]: row.get("reason") for row in rows}
    assert reasons == {"xla": None, "loss": "RuntimeError: RESOURCE_EXHAUSTED: too large"}
