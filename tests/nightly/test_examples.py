"""Each program of `examples/` runs alone, and those that take longer compute what they claim on any mesh."""

import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import ultrascale_jax as us
from tests.examples import FOLDER, load, on_page, run, same
from tests.paths import ROOT
from tests.runs import step_rows
from ultrascale_jax.config import SCHEDULES


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_each_example_runs_alone_outside_the_checkout(path, tmp_path):
    shutil.copy(path, tmp_path)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, path.name], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]


def test_a_term_of_the_loss_and_captured_states_are_those_of_one_device_on_any_mesh():
    example = load("research_hooks")
    one, many = example.main()
    rows, states = example.train(us.MeshConfig(fsdp=2, cp=2, sp=2), jax.devices())
    in_a_pipeline = example.train(us.MeshConfig(pp=2, fsdp=2, sp=2), jax.devices())
    for found in (many[0], rows, in_a_pipeline[0]):
        np.testing.assert_allclose(found, one[0], rtol=1e-5)
    same((many[1], states, in_a_pipeline[1]), (one[1],) * 3)


def test_own_layers_train_on_a_pipeline_and_over_cp_as_on_one_device():
    example = load("own_layer")
    one, many = example.main()
    over_cp = example.losses(us.MeshConfig(fsdp=2, cp=4), jax.devices())
    np.testing.assert_allclose([many, over_cp], [one, one], rtol=1e-5)
    assert one[-1] < one[0] - 0.5


def test_the_training_loop_trains_alike_on_any_mesh():
    example = load("own_training_loop")
    expected = example.losses(us.MeshConfig(fsdp=8))
    assert len(expected) == 10 and expected[-1] < expected[0] - 1
    for sizes in (us.MeshConfig(fsdp=2, cp=4), us.MeshConfig(cp=2, tp=2, pp=2)):
        np.testing.assert_allclose(example.losses(sizes), expected, rtol=1e-5)
    np.testing.assert_allclose(example.main(), expected, rtol=1e-5)


def test_a_layer_of_ones_own_trains_as_its_page_shows(tmp_path):
    trained = run(on_page("docs/layers.md")[0], tmp_path)["trained"]
    assert len(step_rows(tmp_path / "squared_relu")) == 2
    assert trained.stacks[0].mlp.w_up[...].shape == (2, 32, 64)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_of_own_layers_has_the_gradients_of_one_device(schedule):
    same(*load("own_pipeline").main(schedule, "auto"))


def test_a_tuned_model_is_read_back_with_the_logits_that_it_had(tmp_path):
    before, after, read = load("finetune_and_export").main(out=tmp_path)
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(read, after, rtol=0, atol=1e-5)


def test_a_model_in_no_recipe_is_planned_by_formulas_that_xla_confirms():
    compiled, by_formula = load("plan_own_model").main()
    np.testing.assert_allclose(by_formula, compiled, rtol=0.1)


def test_the_journey_from_a_text_to_a_chat(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHON": sys.executable, "STEPS": "60", "TUNE_STEPS": "60"}
    command = ["bash", str(ROOT / "examples" / "journey.sh"), str(tmp_path / "journey")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\$ kill -9 \d+\n", done.stdout)
    assert re.search(r"resumed from \S+/out/base/checkpoints/\d+", done.stdout)
    base, tuned = (step_rows(tmp_path / "journey/out" / name) for name in ("base", "tuned"))
    assert [row["step"] for row in tuned] == list(range(1, 61)) and base[-1]["step"] == 60
    assert base[-1]["loss"] < base[0]["loss"] - 3 and tuned[-1]["loss"] < tuned[0]["loss"] - 1
    before, after = re.findall(r"│ talks *│ *[\d,]+ │ *([\d.]+) │", done.stdout)
    assert float(after) < float(before) - 1
    assert "logits differ by" in done.stdout or "transformers reads config" in done.stdout
    assert "the capital of" in done.stdout.rpartition("$ ultrascale generate")[2]
