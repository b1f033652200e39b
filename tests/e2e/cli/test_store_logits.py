"""`train --store-logits`: a run that reads a teacher's probabilities learns as from the teacher, or is refused."""

import os
import shutil

import jax
import numpy as np
import pytest

from tests.commands import refused, ultrascale
from tests.paths import HF
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.config import UserError
from ultrascale_jax.data import top_k
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.step import gradients, position_weight
from ultrascale_jax.training.setup import make_loader, open_run

RUN = (
    "debug --model.num-layers 1 --data.seq-len 32 --train.global-batch 8 --train.steps 3"
    " --train.distill.temperature 2"
)
TEACHER = f"--train.distill.teacher hf:{HF}/llama3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, and all of a teacher's probabilities for the rows of `RUN` on it, in `topk`."""
    folder, rng = tmp_path_factory.mktemp("stored"), np.random.default_rng(0)
    for number in range(12):
        letters = rng.integers(97, 123, rng.integers(40, 120), dtype=np.uint8)
        (folder / f"{number}.txt").write_bytes(letters.tobytes())
    assert ultrascale(*store(folder), "--mesh", "fsdp=2,cp=2,tp=2") is None
    return folder


def words_of(folder):
    return [*RUN.split(), "--data.source", f"text:{folder}/*.txt", "--log.run-dir", f"{folder}/run"]


def store(folder, out="topk", k=256):
    return [
        "train",
        *words_of(folder),
        *TEACHER.split(),
        "--store-logits",
        folder / out,
        "--top-k",
        k,
    ]


def config(folder, *words):
    words = [*words_of(folder), *map(str, words)]
    return command_line.parse(words, prog="test", options=train.Options)[0].check(8)


def first_gradients(cfg):
    mesh = make_mesh(cfg.mesh)
    with open_run(cfg, mesh, hooks=(), profile=None) as run:
        _, batch, _ = next(run.batches)
        state = run.state

        @jax.jit
        def step(state, batch):
            models = position_weight(state, batch), state.frozen, state.reference
            return gradients(cfg, state.params, batch, *models)

        grads, sums = step(state, batch)
        return [np.asarray(leaf) for leaf in (sums.loss, *jax.tree.leaves(grads))]


def test_all_probabilities_give_the_loss_and_gradients_of_the_teacher_itself(folder):
    stored = "--train.distill.teacher", f"topk:{folder}/topk"
    online = first_gradients(config(folder, *TEACHER.split(), "--mesh", "fsdp=2,dp=4"))
    read = first_gradients(config(folder, *stored, "--mesh", "fsdp=2,cp=2,dp=2"))
    for one, other in zip(read, online, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), rtol=1e-5)


def test_every_step_finds_the_records_of_its_rows_whatever_the_batch(folder):
    stored = "--train.distill.teacher", f"topk:{folder}/topk"
    whole = make_loader(config(folder, *stored))
    parts = make_loader(config(folder, *stored, "--train.global-batch", 4, "--mesh", "dp=4,tp=2"))
    assert len(whole.rows(3)) > 8  # more than one batch of the teacher
    for step in range(6):
        half = {name: value[4 * (step % 2) :][:4] for name, value in whole.batch(step // 2).items()}
        for name, value in parts.batch(step).items():
            np.testing.assert_array_equal(value, half[name], name)
    assert half["teacher_ids"].shape == (4, 32, 256)


def test_a_command_that_was_killed_goes_on_where_it_was(folder, capsys, monkeypatch):
    command = *store(folder, "again"), "--mesh", "fsdp=2,cp=2,tp=2"
    write = top_k.Writer.write

    def killed(self, *row):
        if self.index.done == 8:
            raise KeyboardInterrupt
        write(self, *row)

    monkeypatch.setattr(top_k, "SAVE_S", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(top_k.Writer, "write", killed)
        assert ultrascale(*command) == 130
    with pytest.raises(UserError, match=r"has 8 of \d+ rows; write another"):
        make_loader(config(folder, "--train.distill.teacher", f"topk:{folder}/again"))
    assert ultrascale(*command) is None
    again, straight = (folder / name / "source_00000.top_k" for name in ("again", "topk"))
    assert again.read_bytes() == straight.read_bytes()
    assert "is of another run" in refused(capsys, *store(folder, "again", k=4))


def test_records_of_something_else_are_refused(folder, tmp_path, capsys):
    def check(*words, place=folder / "topk", match):
        with pytest.raises(UserError, match=match):
            make_loader(config(folder, "--train.distill.teacher", f"topk:{place}", *words)).batch(0)

    other = r"teacher='topk:.*is of other data or tokens, data.seq_len or seed; write another"
    check("--train.seed", 1, match=other)
    check("--data.seq-len", 16, match=other)
    check("--data.source", "python-stdlib", match=other)
    check("--train.steps", 99, match=r"is of 24 sequences, and this run reads more; write another")
    check("--model.vocab-size", 300, match="is over 256 tokens; write another")
    check("--train.distill.top-k", 3, match=r"distill.top_k=3: the teacher's is 256; give that")
    check("--train.distill.temperature", 1, match=r"temperature=1.0: the teacher's is 2.0; give")
    shutil.copytree(folder / "topk", tmp_path / "cut")
    file = tmp_path / "cut" / "source_00000.top_k"
    size = file.stat().st_size
    os.truncate(file, 1000)
    check(place=file.parent, match=rf"teacher='topk:.*top_k has 1000 bytes, not {size}; write")
    os.truncate(file, size)
    check(place=file.parent, match=r"teacher='topk:.*top_k has no distribution for a token")
    words = *store(folder), "--train.distill.teacher", f"topk:{folder}/topk"
    assert "must name a model that runs" in refused(capsys, *words)
    (file.parent / "index.json").unlink()
    words = "train", *words_of(folder), "--train.distill.teacher", f"topk:{file.parent}"
    assert "has no index.json; write it with" in refused(capsys, *words)
