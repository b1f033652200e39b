"""A kill in a save leaves a checkpoint that loads; damaged data are refused. tests/nightly/faults has more of both."""

import os
import random

import numpy as np
import pytest

from tests.corpora import save_index
from tests.faults.jobs import RECIPE
from tests.faults.saver import check_newest
from ultrascale_jax.cli import train
from ultrascale_jax.data.shards import write_shard
from ultrascale_jax.data.tokenizer import ByteTokenizer
from ultrascale_jax.launch.exit_codes import REFUSED


def test_a_kill_at_any_moment_of_a_save_leaves_a_newest_that_loads_bit_for_bit(tmp_path, killed):
    """Row 7. Random delays, spread over several saves, in one folder."""
    rng, newest = random.Random(7), []
    for _ in range(3):
        killed(tmp_path, rng.uniform(0, 0.4), 3)
        newest.append(check_newest(tmp_path, 3))
    assert 0 < newest[0] < newest[1] < newest[2]


def test_damaged_shards_are_refused_by_name_before_anything_is_compiled(tmp_path, capsys):
    """Rows 15 and 20: one line, and the code that no supervisor restarts."""
    folder, rng = tmp_path / "tokens", np.random.default_rng(0)
    folder.mkdir()
    tokens = [rng.integers(0, 64, size=50).astype(np.uint16) for _ in range(20)]
    lengths, hashes = np.full(20, 50), np.arange(20, dtype=np.uint64)
    shard = write_shard(folder, 0, tokens, lengths, hashes)
    fields = {"dtype": "uint16", "tokenizer": ByteTokenizer.fingerprint, "vocab_size": 64}
    save_index(folder, [shard], **fields)
    os.truncate(folder / "shard_00000.tokens", 1001)
    words = ["--data.source", f"tokens:{folder}", "--log.run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as refused:
        train.main([RECIPE, *words])
    assert refused.value.code == REFUSED
    error = capsys.readouterr().err
    assert "shard_00000.tokens has 1001 bytes, not 2000: truncated" in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "run/checkpoints").exists()
