"""Measure the cost of reading token shards, before a run and during its steps.

    python -m scripts.benchmark_data FOLDER --documents 10000000 --shards 20 --mean 64
    python -m scripts.benchmark_data FOLDER --documents 1000000000 --shards 220000 --mean 15000 --sparse --processes 8

It makes FOLDER, unless it is there, with documents of random lengths around `--mean` whose tokens are zeros. With
`--sparse` the token files are holes and the shards share the documents of 1,000, so any number takes little disk. Then
`--processes` processes open it as a run does and read batches; docs/benchmarks/README.md has the figures.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ultrascale_jax.data import shards

ROWS = 256
"""Rows of a batch."""
DIFFERENT = 1000
"""Shards of a sparse set with documents of their own."""


def make(folder: Path, documents: int, count: int, mean: int, sparse: bool) -> None:
    """Write `count` shards of `documents` documents in all."""
    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        if sparse and number >= DIFFERENT:
            rows.append(rows[number % DIFFERENT])
            share(folder, number, number % DIFFERENT)
            continue
        size = documents // count
        lengths = rng.integers(mean // 2, mean * 3 // 2, size)
        hashes = rng.integers(0, 2**64 - 1, size, dtype=np.uint64)
        if sparse:
            rows.append(make_sparse(folder, number, lengths, hashes))
        else:
            zeros = np.zeros(int(lengths.sum()), np.uint16)
            rows.append(shards.write_shard(folder, number, [zeros], lengths, hashes))
    index = shards.Index(dtype="uint16", tokenizer="bytes", vocab_size=256, shards=np.array(rows))
    shards.write_index(folder, index)
    shards.IndexWriter(folder, index).save(complete=True)


def make_sparse(folder: Path, number: int, lengths: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Write a shard whose token file is a hole, and return its row of the table."""
    shard, size = shards.describe_shard(lengths, hashes), 2 * int(lengths.sum())
    whole, last_bytes = divmod(size, shards.CHUNK_BYTES)
    digests = [digest_of_zeros(shards.CHUNK_BYTES)] * whole
    digests += [digest_of_zeros(last_bytes)] if last_bytes else []
    shards.write_documents(folder, number, shard, lengths, hashes, digests)
    path = folder / f"{shards.shard_name(number)}.tokens"
    path.touch()
    os.truncate(path, size)
    return shard


def digest_of_zeros(size: int) -> bytes:
    return hashlib.sha256(bytes(size)).digest()[: shards.DIGEST_BYTES]


def share(folder: Path, number: int, other: int) -> None:
    """Give a shard the documents of another, and a hole of as many tokens."""
    name, other_name = (shards.shard_name(one) for one in (number, other))
    os.link(folder / f"{other_name}.documents", folder / f"{name}.documents")
    (folder / f"{name}.tokens").touch()
    os.truncate(folder / f"{name}.tokens", (folder / f"{other_name}.tokens").stat().st_size)


def anonymous_mib() -> float:
    """Return the resident memory of this process above the page cache, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def read(folder: str, seq_len: int, steps: int) -> dict[str, float]:
    """Open the shards as a run does, read batches of 256 rows, and return the figures."""
    from ultrascale_jax.config import DataConfig
    from ultrascale_jax.data.loader import Loader

    begun, cpu, memory = time.monotonic(), time.process_time(), anonymous_mib()
    data = DataConfig(source=f"tokens:{folder}", seq_len=seq_len)
    loader = Loader(data, vocab_size=256, global_batch=ROWS, seed=0)
    loader.batch(0)
    first, first_cpu = time.monotonic(), time.process_time()
    for step in range(1, steps + 1):
        loader.batch(step)
    rate = steps * ROWS * seq_len / max(time.process_time() - first_cpu, 1e-9)
    return {
        "first_batch_s": first - begun,
        "first_batch_cpu_s": first_cpu - cpu,
        "data_mib": anonymous_mib() - memory,
        "process_mib": anonymous_mib(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "million_tokens_per_cpu_s": rate / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--mean", type=int, default=64, help="tokens of a document")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(read(args.folder, args.seq_len, args.steps)))
        return
    if not Path(args.folder).exists():
        make(Path(args.folder), args.documents, args.shards, args.mean, args.sparse)
    words = ("--seq-len", str(args.seq_len), "--steps", str(args.steps), "--child")
    command = [sys.executable, "-m", "scripts.benchmark_data", args.folder, *words]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(args.processes)]
    reports = [json.loads(process.communicate()[0]) for process in started]
    worst = {name: max(one[name] for one in reports) for name in reports[0]}
    worst["million_tokens_per_cpu_s"] = min(one["million_tokens_per_cpu_s"] for one in reports)
    worst["host_data_mib"] = sum(one["data_mib"] for one in reports)
    print(json.dumps({name: round(value, 2) for name, value in worst.items()}))


if __name__ == "__main__":
    main()
