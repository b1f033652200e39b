"""Compare every family with `transformers`, number by number: `python -m tests.cards [FAMILY...]`.

Writes docs/cards.csv, a row for each checkpoint of `tests/data/hf`, or the rows of those that are named. A difference
is |ours - theirs| / |theirs|, in float32 on one device.
"""

import csv
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from tests.hf_layout import saved, stored
from tests.hf_numbers import forward, run
from tests.paths import CARDS, HF
from ultrascale_jax.huggingface.config import read_model_type


def difference(ours, theirs) -> str:
    """Return the distance of two arrays as a share of the second one."""
    distance = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
    return f"{distance / np.linalg.norm(theirs):.1e}"


def card(name: str) -> dict[str, str]:
    """Return the row of a checkpoint."""
    cfg, mesh, params, batch, expected = run(name, "dp=1")
    model_type = read_model_type(HF / name)
    with tempfile.TemporaryDirectory() as place:
        before, after = stored(HF / name), saved(params, Path(place) / "saved", model_type)
    logits, loss, *_ = forward(cfg, mesh, params, batch)
    same = [key for key in before if key in after and np.array_equal(before[key], after[key])]
    return {
        "checkpoint": name,
        "family": model_type,
        "logits": difference(logits, expected["logits"]),
        "loss": difference(loss, expected["loss"]),
        "tensors that come back": f"{len(same)} of {len(before.keys() | after.keys())}",
    }


def main(names: list[str]) -> None:
    """Write the rows of these checkpoints, or of all."""
    rows = {}
    if names:
        with CARDS.open(newline="") as file:
            rows = {row["checkpoint"]: row for row in csv.DictReader(file)}
    for name in names or sorted(path.name for path in HF.iterdir()):
        rows[name] = card(name)
        print(*rows[name].values(), sep="  ", flush=True)
    rows = [rows[name] for name in sorted(rows)]
    with CARDS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
