"""`ultrascale plan compile`: what a step needs on GPUs that are not there."""

import functools
import json
import re

import pytest

from tests.gpu_programs import FAST, NO_MACHINE_CODE
from ultrascale_jax import hlo
from ultrascale_jax.cli import plan
from ultrascale_jax.plan.compiled import compile as compiled
from ultrascale_jax.units import rounded

RUN = "compile debug --gpus 8 --mesh fsdp=8 --train.zero 3 --train.remat none --model.num-layers 2".split()
RUN += "--data.seq-len 32 --train.global-batch 8".split()

COMPILED = functools.cache(functools.partial(compiled.compile_step, options=FAST | NO_MACHINE_CODE))


@pytest.fixture(autouse=True)
def one_compilation(monkeypatch):
    monkeypatch.setattr(compiled, "compile_step", COMPILED)


def test_compile_reports_memory_communication_and_time(tmp_path, capsys):
    folder = tmp_path / "kept"
    plan.main([*RUN, "--json", "--dump", str(folder)])
    summary = json.loads(capsys.readouterr().out)
    assert 0 < summary["argument_bytes"] < summary["peak_bytes"]
    sizes = ("argument_bytes", "temporary_bytes", "workspace_bytes")
    assert summary["needed_bytes"] == sum(summary[name] for name in sizes)
    by_kind = {(row["kind"], row["axes"]): row for row in summary["collectives"]}
    assert by_kind["all-gather", "fsdp"]["sent_bytes"] > 0
    assert by_kind["reduce-scatter", "fsdp"]["sent_bytes"] > 0
    assert summary["synchronous"] + summary["asynchronous"] > 0

    exposed = sum(row["exposed_s"] for row in summary["collectives"])
    assert 0 < exposed <= sum(row["seconds"] for row in summary["collectives"])
    assert exposed == pytest.approx(sum(summary["exposed_s"].values()))
    assert summary["idle_s"] + sum(summary["busy_s"].values()) == pytest.approx(summary["step_s"])
    assert sum(summary["time_s"].values()) == pytest.approx(summary["step_s"])
    assert (summary["schema"], summary["source"], summary["verdict"]) == (1, "compiled", "fits")
    tokens = 8 * 32 / 8
    assert summary["tokens_per_s_gpu"] == pytest.approx(tokens / summary["step_s"])

    held, unshown = summary["memory_over_step"], 4096  # of constants
    peak = max(map(sum, zip(*held["bytes"].values(), strict=True)))
    assert 0 <= summary["peak_bytes"] - peak < unshown
    assert held["start_s"] == sorted(held["start_s"]) and held["start_s"][-1] < summary["step_s"]

    assert json.loads((folder / "summary.json").read_text()) == summary
    program = hlo.parse((folder / "step.hlo").read_text())
    assert program.entry and "exec_time_us" in (folder / "step.hlo").read_text()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == sum(map(len, summary["timeline"]["streams"].values()))
    assert {"loop_add_fusion", "all-gather-start"} <= {
        event["name"].split(".")[0] for event in shown
    }

    assert summary["bill"] is None


def test_compile_prints_the_speed_the_bill_and_a_picture(tmp_path, capsys):
    plan.main([*RUN, "--json"])
    summary = json.loads(capsys.readouterr().out)
    priced = ["--price", "2", "--tokens", "1T", "--failure-hours", "900", "--restart-s", "60"]
    plan.main([*RUN, *priced, "--figure", str(tmp_path / "step.png")])
    text = capsys.readouterr().out
    days = 1e12 / 8 / summary["tokens_per_s_gpu"] / 86400
    goodput = float(re.findall(r"goodput (\d+\.\d+)%", text)[0]) / 100
    told = float(re.findall(r"the whole training: ([\d.]+) days", text)[0])
    assert told == pytest.approx(days / goodput, rel=2e-3)
    assert (
        f"│ TFLOP/s/GPU                                  │ {rounded(summary['tflops_per_s_gpu'])}"
        in text
    )
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert f"{summary['step_s'] * 1e3:.1f}" in text and "reduce-scatter" in text and "fits" in text
