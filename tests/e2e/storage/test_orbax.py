"""Orbax's own saves to a bucket. `checkpoint/copies.py` copies checkpoints because they fail."""

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.options import AtomicityMode, AtomicityOptions


@pytest.mark.parametrize("mode", list(AtomicityMode))
def test_orbax_itself_cannot_save_to_a_bucket(s3_server, tmp_path, monkeypatch, mode):
    """When this fails, Orbax may write checkpoints to the bucket itself."""
    monkeypatch.chdir(tmp_path)  # it makes folders below `s3:/` on the disk
    options = ocp.CheckpointManagerOptions(
        atomicity_options=AtomicityOptions(mode=mode), enable_async_checkpointing=False
    )
    place = f"s3://bucket/{tmp_path.name}/{mode}"
    with ocp.CheckpointManager(place, options=options) as manager:
        with pytest.raises(ValueError, match=r"path should be absolute\. Got s3:/bucket"):
            manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(4)}))
        assert manager.all_steps(read=True) == []
