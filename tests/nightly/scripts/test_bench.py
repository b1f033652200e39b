"""The benchmarks' commands as a whole."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from scripts.bench import __main__ as bench


def test_the_peer_suite_times_every_trainer(tmp_path):
    path = tmp_path / "peer.json"
    words = ["scripts.bench", "peer", "--tiny", "--out", str(path), "--steps", "3"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(path.read_text())
    assert report["command"].startswith("python -m scripts.bench peer --tiny")
    rows = {row["contestant"]: row for row in report["results"]}
    assert list(rows) == ["ultrascale_jax, remat dots", "bare JAX, scanned", "bare JAX, unrolled"]
    for name, row in rows.items():
        assert row["num_steps"] == 3
        assert 0 < row["step_s"]["p10"] <= row["step_s"]["median"] <= row["step_s"]["p90"]
        assert row["tokens_per_s"] == pytest.approx(4 * 64 / row["step_s"]["median"])
        assert row["tokens_per_cpu_s"] > 0 and row["peak_gb"] > 0.001 and row["compile_s"] > 0
        assert row["loss"] == pytest.approx(np.log(256), abs=0.3)
        assert name in done.stdout
    assert report["versions"]["jax"] == jax.__version__


def test_the_suite_kernels_runs_without_a_gpu_by_xla(tmp_path):
    path = tmp_path / "kernels.json"
    assert bench.main(["kernels", "--tiny", "--steps", "2", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    assert len(rows) == 9 and all("of_roofline" in row for row in rows[3:])
