"""Run a teacher over the rows of a run, and store its largest probabilities for each target (`data/top_k.py`)."""

import itertools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ultrascale_jax.checkpoint.init_from import initial_params
from ultrascale_jax.config import Config
from ultrascale_jax.config.distill import TEACHER
from ultrascale_jax.data.top_k import Index, Writer
from ultrascale_jax.sharding.sequence_order import sequence_order
from ultrascale_jax.train_step.forward_steps import make_top_k_step
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.training.scoring import on_devices
from ultrascale_jax.training.setup import fit_loaders, make_loader


def store_logits(
    cfg: Config, mesh: Mesh, folder: Path, k: int, tell: Callable[[str], object]
) -> Index:
    """Write the records that `folder` has not yet, `train.global_batch` rows at once, and return its index.

    Args:
      cfg: a run with a teacher that runs, checked for `mesh`.
      mesh: its mesh, of this process alone.
      folder: the folder.
      k: how many probabilities of a target are stored.
      tell: gets the progress as text.
    """
    with jax.set_mesh(mesh):
        loader = make_loader(cfg)
        if mesh.devices.flat[0].platform == "gpu" and cfg.data.document_mask:
            cfg, _ = fit_loaders(cfg, (loader,))
        rows = loader.rows(cfg.train.steps)
        writer = Writer(folder, Index.of(cfg, loader, k, len(rows)))
        reference = abstract_state(cfg, mesh).reference
        assert reference is not None, "the run has a teacher that runs"
        teacher, step = initial_params(cfg, reference, mesh, TEACHER), make_top_k_step(cfg, k)
        natural = np.argsort(sequence_order(cfg.data.seq_len, cfg.mesh.cp, cfg.cp))
        for some in itertools.batched(rows[writer.index.done :], cfg.train.global_batch):
            batch = on_devices(cfg, [loader.row(*row) for row in some], cfg.data.seq_len)
            stored = jax.device_get(step(teacher, batch))
            for row, ids, logps in zip(some, stored.ids, stored.logps, strict=False):
                writer.write(row[0], loader.spans(*row), ids[natural], logps[natural])
            tell(f"{writer.index.done:,} of {len(rows):,} rows")
        writer.save()
    return writer.index
