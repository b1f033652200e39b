"""Compare every family with `transformers`, number by number: `python -m tests.cards [FAMILY...]`.

Writes docs/cards.csv, a row for each checkpoint of `tests/data/hf`, or the rows of those that are named. It wants torch
and transformers, which no test does. A difference is |ours - theirs| / |theirs| of the worst tensor, in float32 on one
device. A module that predicts ahead is left out, as by `transformers`, but for the round trip.
"""

import csv
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch

from tests.data.make_hf import Reference
from tests.hf_layout import in_hugging_face_layout, load, stored
from tests.hf_numbers import forward, run, steps
from tests.paths import CARDS, HF
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config, read_model_type


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """Return the largest |ours - theirs| / |theirs| of arrays by name."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    worst = 0.0
    for name, array in theirs.items():
        distance = np.linalg.norm(np.asarray(ours[name], np.float64) - array)
        if distance:  # some gradients are zeros
            worst = max(worst, float(distance / np.linalg.norm(array)))
    return worst


def tensors(tree, cfg, model_type: str) -> dict[str, np.ndarray]:
    """Return parameters as the tensors of a checkpoint, in float64: norms are added to and subtracted from 1."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    return in_hugging_face_layout(wide, cfg.model, model_type)


def card(name: str) -> dict[str, str]:
    """Return the row of a checkpoint."""
    folder = HF / name
    cfg, mesh, params, batch, _ = run(name, "dp=1", mtp_layers=0)
    model_type = read_model_type(folder)
    reference = Reference(folder, torch.tensor(np.asarray(batch["tokens"])).long())
    with tempfile.TemporaryDirectory() as place:
        temporary = Path(place)
        logits, loss = reference.backward()
        reference.save_gradients(temporary / "gradients")
        reference.update()
        reference.model.save_pretrained(temporary / "stepped")
        gradients, stepped = (stored(temporary / kind) for kind in ("gradients", "stepped"))
        model = load(folder)
        written = {"dtype": "float32", "model_type": model_type}
        checkpoint.save(model, read_config(folder), temporary / "saved", **written)
        before, after = stored(folder), stored(temporary / "saved")
    our_logits, our_loss, our_gradients, _ = forward(cfg, mesh, params, batch)
    zeros = tensors(jax.tree.map(np.zeros_like, our_gradients), cfg, model_type)
    moved = tensors(our_gradients, cfg, model_type)
    weights, _ = next(steps(cfg, mesh, params, batch))
    differences = {
        "logits": difference({"": our_logits}, {"": logits.numpy()}),
        "loss": difference({"": our_loss}, {"": loss.numpy()}),
        "gradients": difference({key: moved[key] - zeros[key] for key in moved}, gradients),
        "weights after a step": difference(tensors(weights, cfg, model_type), stepped),
    }
    same = [key for key in before if key in after and np.array_equal(before[key], after[key])]
    return {
        "checkpoint": name,
        "family": model_type,
        **{kind: f"{value:.1e}" for kind, value in differences.items()},
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
