"""One of two processes that open a folder of token shards together: `shard_reader FOLDER_OF_0 FOLDER_OF_1`.

It prints the shards that it has checked: the others it maps when their tokens are read, which nobody does here.
"""

import os
import sys
from pathlib import Path

from ultrascale_jax.data.corpus import open_shards
from ultrascale_jax.launch import distributed

if __name__ == "__main__":
    opened: set[str] = set()

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(".tokens"):
            opened.add(Path(arguments[0]).stem)

    distributed.initialize()
    sys.addaudithook(note)
    folder = Path(sys.argv[1 + int(os.environ["JAX_PROCESS_ID"])])
    with distributed.guarded():
        open_shards(folder, 256, "bytes", share_checks=True)
    print("checked", *sorted(opened))
