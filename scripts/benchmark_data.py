"""Measure what reading token shards costs: `python -m scripts.benchmark_data FOLDER --documents 1000000`.

It makes a folder of synthetic shards (unless it is there), reads batches of it in a process of its own, and prints one
row of docs/benchmarks/data.md. `--sparse` writes no tokens: their files are holes, which read as zeros, so 10^9 documents take
16 GB of disk.
"""

import resource
import time
from pathlib import Path

ROWS = 256
"""Rows of a batch."""


def anonymous_mib() -> float:
    """Return the resident memory of this process above the page cache, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def read(folder: str, seq_len: int, steps: int) -> dict:
    """Open the shards as a run does, read batches of 256 rows, and return the figures."""
    begun = time.monotonic()
    from ultrascale_jax.config import DataConfig
    from ultrascale_jax.data.loader import Loader

    imported, imported_cpu, imported_mib = time.monotonic(), time.process_time(), anonymous_mib()
    data = DataConfig(source=f"tokens:{folder}", seq_len=seq_len)
    loader = Loader(data, vocab_size=256, global_batch=ROWS, seed=0)
    loader.batch(0)
    first, first_cpu = time.monotonic(), time.process_time()
    for step in range(1, steps + 1):
        loader.batch(step)
    rate = steps * ROWS * seq_len / (time.process_time() - first_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "import_s": imported - begun,
        "first_batch_s": first - imported,
        "first_batch_cpu_s": first_cpu - imported_cpu,
        "anonymous_mib": anonymous_mib() - imported_mib,
        "peak_rss_mib": peak,
        "million_tokens_per_cpu_s": rate / 1e6,
    }
