"""What `train.remat` keeps is what it says: seen in the memory of the compiled step and in the work of its loops."""

import pytest

LAYERS = 6


def layer_matmuls(step, attention: bool) -> int:
    """Matrix products, or attention calls, in the loops over the layers."""
    return sum(m.loops[-1:] == (LAYERS,) and m.attention == attention for m in step.matmuls)


@pytest.fixture(scope="session")
def steps(compiled):
    policies = ("none", "selective", "dots", "full", "save:q,k,v,attn_core", "offload:gate,up")
    return {remat: compiled(8, {"fsdp": 8}, remat=remat)[1] for remat in policies}


def test_nothing_is_computed_twice_without_recomputation(steps):
    """7 products forward and 14 backward; full recomputation adds all but w_down's, whose result nobody needs."""
    none, full = (layer_matmuls(steps[name], attention=False) for name in ("none", "full"))
    assert none == 3 * 7
    assert full == none + 6


def test_attention_runs_once_forward_and_once_backward_without_recomputation(steps):
    assert layer_matmuls(steps["none"], attention=True) == 2
    assert layer_matmuls(steps["full"], attention=True) == 3


def test_dots_recomputes_no_product_with_parameters(steps):
    assert layer_matmuls(steps["dots"], attention=False) == 3 * 7


def test_what_is_kept_takes_memory(steps):
    kept = [
        steps[name].temporary_bytes for name in ("full", "save:q,k,v,attn_core", "dots", "none")
    ]
    assert kept == sorted(kept)
    assert len(set(kept)) == 4


def test_no_recomputation_keeps_every_tensor_of_the_layer(steps):
    """At least the bf16 results of the 7 products, for each layer and token."""
    batch, seq_len, widths = 2, 512, 4 * 512 + 2 * 1536 + 512
    least = LAYERS * batch * seq_len * widths * 2
    assert steps["none"].temporary_bytes - steps["full"].temporary_bytes > least


def test_offloaded_tensors_live_on_the_host(steps):
    batch, seq_len, d_ff = 2, 512, 1536
    assert steps["offload:gate,up"].host_bytes == LAYERS * batch * seq_len * 2 * d_ff * 2
    assert steps["full"].host_bytes == 0
