"""Two policies of recomputation, one of the first layers and one of the last, in the memory of the compiled step."""

import pytest

from tests.gpu_programs import LAYERS, compiled, matrices
from ultrascale_jax.config import Keep, Split

NAMED = Keep(saved=("q", "k", "v", "attn_core"), offloaded=("gate", "up"))


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
