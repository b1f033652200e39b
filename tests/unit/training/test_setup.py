"""A run's set-up: what is described, fitted to its data, or refused before anything is written."""

import dataclasses
import math

import pytest

from tests.faults.tiny import config as TINY
from tests.runs import change, run
from ultrascale_jax.config import UserError
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.kernels.document_classes import max_documents
from ultrascale_jax.training.evaluation import mean_loss
from ultrascale_jax.training.setup import fit_documents, fit_loaders

BASE = change(TINY, mesh={"fsdp": 1})


def test_a_run_that_cannot_be_is_refused_before_anything_is_written(tmp_path):
    words = r"kernels\.attention='cudnn': needs a GPU, and this is a cpu"
    with pytest.raises(UserError, match=words):
        run(change(BASE, kernels={"attention": "cudnn"}), tmp_path / "run")
    with pytest.raises(UserError, match=r"^log\.run_dir='.*cannot read checkpoints"):
        run(BASE, tmp_path / "b[1]")
    assert list(tmp_path.iterdir()) == []


def test_more_documents_than_packed_attention_has_room_for_get_a_mask_and_a_line():
    cfg = change(BASE, data={"seq_len": 8192}, train={"precision": "bf16"})
    room = max_documents(8192)
    for never_packed in ({"mesh": {"cp": 8}}, {"train": {"precision": "fp32"}}):
        assert fit_documents(change(cfg, **never_packed), room + 1)[1] == []
    assert fit_documents(cfg, room) == (cfg, [])
    masked, (line,) = fit_documents(cfg, room + 1)
    assert masked == change(cfg, kernels={"attention": "cudnn"})
    assert f"can have {room + 1} documents, and has room for {room}" in line
    # A place of a ring may have them all.
    assert fit_documents(change(cfg, mesh={"cp": 2}), max_documents(4096) + 1)[1] != []
    forced = change(cfg, kernels={"attention": "cudnn_packed"})
    with pytest.raises(UserError, match=r"kernels\.attention='cudnn_packed'.*use auto or cudnn"):
        fit_documents(forced, room + 1)
    # Rows that were not counted stop the run, where attention is packed.
    for fitted, expected in ((cfg, room), (masked, None)):
        data = dataclasses.replace(fitted.data, source="python-stdlib")
        loader = Loader(data, vocab_size=256, global_batch=8, seed=0)
        assert fit_loaders(fitted, [loader]) == (fitted, []) and loader.room == expected


def test_a_source_without_targets_has_no_loss():
    assert mean_loss(6.0, 4) == 1.5
    assert math.isnan(mean_loss(0.0, 0))
