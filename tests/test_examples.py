"""The programs of `examples/` run, and compute what they claim."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import ultrascale_jax as us
from ultrascale_jax.config import SCHEDULES

FOLDER = Path(__file__).parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.slow
def test_ring_attention_in_a_plain_nnx_model_has_the_gradients_of_dense_attention():
    got, expected = load("ring_attention").main()
    assert len(jax.tree.leaves(got)) == 5
    same(got, expected)


@pytest.mark.parametrize("name", ["gather_ahead", "fp8_and_loss", "own_experts"])
def test_a_part_computes_the_loss_and_gradients_of_one_device(name):
    same(*load(name).main())


def test_a_tree_comes_back_as_it_was_on_another_mesh():
    loaded, tree = load("own_trees").main()
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)


@pytest.mark.slow
def test_a_term_of_the_loss_and_captured_states_are_those_of_one_device_on_any_mesh():
    example = load("research_hooks")
    one, many = example.main()
    rows, states = example.train(us.MeshConfig(fsdp=2, cp=2, sp=2), jax.devices())
    in_a_pipeline = example.train(us.MeshConfig(pp=2, fsdp=2, sp=2), jax.devices())
    for found in (many[0], rows, in_a_pipeline[0]):
        np.testing.assert_allclose(found, one[0], rtol=1e-5)
    same((many[1], states, in_a_pipeline[1]), (one[1],) * 3)


@pytest.mark.slow
def test_own_layers_train_on_a_pipeline_and_over_cp_as_on_one_device():
    example = load("own_layer")
    one, many = example.main()
    over_cp = example.losses(us.MeshConfig(fsdp=2, cp=4), jax.devices())
    np.testing.assert_allclose([many, over_cp], [one, one], rtol=1e-5)
    assert one[-1] < one[0] - 0.5


@pytest.mark.slow
def test_the_training_loop_trains_alike_on_any_mesh():
    example = load("own_training_loop")
    expected = example.losses(us.MeshConfig(fsdp=8))
    assert len(expected) == 10 and expected[-1] < expected[0] - 1
    for sizes in (us.MeshConfig(fsdp=2, cp=4), us.MeshConfig(cp=2, tp=2, pp=2)):
        np.testing.assert_allclose(example.losses(sizes), expected, rtol=1e-5)
    np.testing.assert_allclose(example.main(), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_function_of_ones_own_is_planned_with_what_xla_makes_of_it():
    example = load("plan_own_function")
    program, timeline = example.main()
    matrix = example.WIDTH * 4 * example.WIDTH
    held = 4 * 2 * example.LAYERS * matrix + 2 * example.TOKENS * example.WIDTH
    assert program.argument_bytes == held // example.GPUS
    # Each of two matrices is gathered forward and backward, and its gradient scattered.
    kinds = [c.kind for c in program.collectives if c.times == example.LAYERS]
    assert sorted(kinds) == ["all-gather"] * 4 + ["reduce-scatter"] * 2
    flops = 8 * 2 * example.LAYERS * example.TOKENS * matrix / example.GPUS
    assert flops / 989e12 < timeline.step_s - timeline.idle_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "axes"),
    [
        ("interleaved", "explicit"),
        ("zb_h1", "auto"),
        # The executor's own tests imply them (`tests/parallel/test_pipeline.py`).
        *(
            pytest.param(name, "auto", marks=pytest.mark.wide)
            for name in SCHEDULES
            if name != "zb_h1"
        ),
    ],
)
def test_a_pipeline_of_own_layers_has_the_gradients_of_one_device(schedule, axes):
    same(*load("own_pipeline").main(schedule, axes))


@pytest.mark.wide  # `tests/cli/test_finetune.py` runs its parts by commands
def test_a_tuned_model_is_read_back_with_the_logits_that_it_had(tmp_path):
    before, after, read = load("finetune_and_export").main(out=tmp_path)
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(read, after, rtol=0, atol=1e-5)


@pytest.mark.wide  # `tests/plan` and `tests/hlo` compare formulas and programs
def test_a_model_in_no_recipe_is_planned_by_formulas_that_xla_confirms():
    compiled, by_formula = load("plan_own_model").main()
    np.testing.assert_allclose(by_formula, compiled, rtol=0.1)


@pytest.mark.wide
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_each_example_runs_alone_outside_the_checkout(path, tmp_path):
    shutil.copy(path, tmp_path)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, path.name], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]
