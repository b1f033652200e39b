"""A run evaluates its own sources to the numbers of `ultrascale evaluate`, which knows the names of tasks."""

import dataclasses
import json

import numpy as np
import pytest

from tests.commands import refused
from tests.faults.tiny import config as tiny
from tests.paths import HF
from tests.runs import change, run
from ultrascale_jax.cli.evaluate import main
from ultrascale_jax.config import DataConfig, MeshConfig


@pytest.mark.parametrize("mesh", ["fsdp=8", "pp=2,cp=2,tp=2"])
def test_a_run_evaluates_its_own_sources_to_the_numbers_of_this_command(tmp_path, capsys, mesh):
    # Rows are one document each, all equal: whichever are taken, they have one mean.
    for name in "ab":
        for i in range(9):
            (tmp_path / f"{name}{i}.txt").write_text((name * 9 + " ") * 3 + "z")
    given = {name: f"text:{tmp_path}/{name}*.txt" for name in "ab"}
    data = DataConfig(
        seq_len=32,
        source=f"text:{tmp_path}/*.txt",
        eval_source=",".join("=".join(pair) for pair in given.items()),
    )
    cfg = change(tiny, model={"vocab_size": 256}, train={"steps": 2, "eval_batches": 9})
    cfg = dataclasses.replace(cfg, data=data, mesh=MeshConfig.parse(mesh))
    summary = run(cfg, tmp_path / "run")
    assert "9 of the 9 documents of data.eval_source b are in data.source too" in (
        printed := capsys.readouterr().out
    )
    main([str(tmp_path / "run"), *(f"--source={n}={s}" for n, s in given.items()), "--json"])
    found = json.loads(capsys.readouterr().out)["sources"]
    losses = {name: found[name]["loss"] for name in "ab"}
    for name, loss in losses.items():
        np.testing.assert_allclose(summary[f"eval_loss_{name}"], loss, rtol=1e-5)
    np.testing.assert_allclose(summary["eval_loss"], sum(losses.values()) / 2, rtol=1e-5)
    assert losses["a"] != losses["b"] and ": a {a:.4f}, b {b:.4f}\n".format(**losses) in printed


def test_a_task_that_the_harness_lacks_is_told(capsys):
    """It reads the harness's thousands of files."""
    said = refused(
        capsys, "evaluate", HF / "llama3", "--tokenizer", "bytes", "--tasks", "x,arc_easy"
    )
    assert "tasks='x,arc_easy': lm-evaluation-harness has no x; give" in said
