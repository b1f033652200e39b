"""Shards of random preference pairs, for tests to which their text is nothing."""

from pathlib import Path

import numpy as np

from tests.corpora import save_index
from ultrascale_jax.data.shards import write_shard

PROMPT = 3
"""Most tokens of a prompt."""


def write_pairs(folder: Path, count: int = 200, vocab_size: int = 64, longest: int = 14) -> str:
    """Write shards of `count` pairs whose documents have 4 to `longest` tokens; return their `data.source`."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = rng.integers(4, longest + 1, 2 * count)
    tokens = [rng.integers(0, vocab_size, length).astype(np.uint8) for length in lengths]
    answers = [np.arange(length) >= PROMPT for length in lengths]
    hashes = np.repeat(np.arange(count, dtype=np.uint64) * 7919, 2)
    shard = write_shard(folder, 0, tokens, lengths, hashes, answers)
    settings = {"preferences": True}
    fields = {"dtype": "uint8", "tokenizer": "bytes", "vocab_size": vocab_size}
    save_index(folder, [shard], **fields, settings=settings, answers=True)
    return f"tokens:{folder}"
