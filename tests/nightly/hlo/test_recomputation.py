"""Policies of recomputation in the memory of the compiled step: two of one model, and the host's."""

import pytest

from tests.gpu_programs import LAYERS, NAMED, compiled, matrices
from ultrascale_jax.config import Keep, Split


def test_memory_is_linear_in_the_number_of_layers_with_a_policy():
    """But for the parameters of one layer; and the policy that keeps less needs less memory in the first layers."""
    cfg, full = compiled(8, {"fsdp": 8})
    count, layers = LAYERS, cfg.model.num_layers
    alone, split, reverse = (
        compiled(8, {"fsdp": 8}, remat=remat)[1]
        for remat in (
            NAMED,
            Split(first="full", layers=count, last=NAMED),
            Split(first=NAMED, layers=layers - count, last="full"),
        )
    )
    kept, kept_split = (step.temporary_bytes - full.temporary_bytes for step in (alone, split))
    gathered = 2 * sum(matrices(cfg).values())  # norms apart
    assert kept_split == pytest.approx(kept * (layers - count) / layers, abs=1.01 * gathered)
    assert split.host_bytes * layers == alone.host_bytes * (layers - count)
    assert split.temporary_bytes < reverse.temporary_bytes


def test_nothing_of_a_layer_stays_on_the_device_that_the_host_keeps():
    cfg, full = compiled(8, {"fsdp": 8})
    _, step = compiled(8, {"fsdp": 8}, remat=Keep(offloaded=("layer_input", "attn_core")))
    m, tokens = cfg.model, cfg.train.global_batch * cfg.data.seq_len // 8
    attended = 2 * m.num_heads * m.head_dim + 4 * m.num_heads  # with the log-sum-exp
    assert step.host_bytes == m.num_layers * tokens * (2 * m.d_model + attended)
    # Rows on their way there and back are on the device.
    inputs = m.num_layers * tokens * 2 * m.d_model
    assert full.temporary_bytes - step.temporary_bytes > inputs * (1 - 2 * LAYERS / m.num_layers)
