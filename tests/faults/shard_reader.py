"""One of two processes that open a folder of token shards together: `shard_reader FOLDER_OF_0 FOLDER_OF_1`.

It prints the shards that it has checked, which it opens once more than those that it only maps into memory.
"""

import os
import sys
from collections import Counter
from pathlib import Path

from ultrascale_jax import distributed
from ultrascale_jax.data.shards import open_shards

if __name__ == "__main__":
    opened: Counter = Counter()

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(".tokens"):
            opened[Path(arguments[0]).stem] += 1

    distributed.initialize()
    sys.addaudithook(note)
    folder = Path(sys.argv[1 + int(os.environ["JAX_PROCESS_ID"])])
    with distributed.guarded():
        open_shards(folder, 256, "bytes", together=True)
    print("checked", *sorted(name for name, times in opened.items() if times == 2))
