"""The programs of `examples/` compute what they claim; tests/nightly runs those that take longer, and all alone."""

import jax
import numpy as np
import pytest

from tests.examples import load, same


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
