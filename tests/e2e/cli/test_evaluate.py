"""`ultrascale evaluate`: numbers against float64 on one device, on meshes of eight; and what it refuses."""

import json
import math

import jax
import numpy as np
import pytest
import tokenizers

from tests import runs
from tests.commands import refused
from tests.paths import HF
from ultrascale_jax.cli.evaluate import main
from ultrascale_jax.cli.models import ScoreOptions, opened
from ultrascale_jax.config import Config, DataConfig, LogConfig, MeshConfig, TrainConfig, UserError
from ultrascale_jax.data.held_out import ALL
from ultrascale_jax.data.samples import PackedSamples
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.data.tokenizer import ByteTokenizer
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.training.scoring import Scorer, source_rows

FOLDER = HF / "llama3"
T = 64
TEXTS = {"one": ["a short one", "caf\u00e9 " * 30], "two": ["x" * 300, "y = 2\n" * 41, "z"]}
PAIRS = [
    ("2 + 2 =", " 4"),
    ("2 + 2 =", " four, I think"),
    ("The sky is", " a\u00df"),
    ("Q", "no"),
    ("again", "AAAA"),
]
"""Contexts and continuations."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text of two domains, and a run that was imported from the checkpoint."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, texts in TEXTS.items():
        (folder / name).mkdir()
        for i, text in enumerate(texts):
            (folder / name / f"{i}.txt").write_text(text)
    cfg = Config(
        mesh=MeshConfig(fsdp=8),
        data=DataConfig(source="synthetic", seq_len=T),
        train=TrainConfig(precision="fp32"),
        log=LogConfig(run_dir=str(folder / "run")),
    )
    runs.imported(cfg, FOLDER)
    return folder


@pytest.fixture(scope="module")
def log_probabilities():
    """A function of ids to the float64 log-probability of every id but the first, by the logits on one device."""
    cfg = Config(model=read_config(FOLDER), mesh=MeshConfig(fsdp=1))
    mesh = make_mesh(cfg.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = checkpoint.load(FOLDER, abstract_state(cfg, mesh).params)
    run = jax.jit(lambda model, *batch: model.logits(*batch))

    def found(ids):
        tokens = np.zeros((1, T + 1), np.int32)
        tokens[0, : len(ids)] = ids
        with jax.set_mesh(mesh):
            logits = run(model, tokens, np.arange(T + 1, dtype=np.int32)[None])
        logits = np.asarray(logits, np.float64)[0, : len(ids) - 1]
        lse = np.log(np.exp(logits).sum(axis=1))
        return np.array([row[i] for row, i in zip(logits, ids[1:], strict=True)]) - lse

    return found


def expected_source(folder, name, log_probabilities):
    """Nats, predicted tokens and their bytes of text, piece of document by piece."""
    data = DataConfig(source=f"text:{folder}/{name}/*.txt", seq_len=T)
    [corpus] = open_sources(data, 256).corpora
    rows = PackedSamples(corpus, ALL, data, ("evaluate",), remainder=True)
    nats, targets = 0.0, []
    for row in (rows[i] for i in range(len(rows))):
        for segment in np.unique(row["segment_ids"]):
            here = row["segment_ids"] == segment
            following = row["targets"][here][row["targets"][here] >= 0]
            ids = [*row["tokens"][here][:1], *following]
            nats -= log_probabilities(ids).sum() if len(ids) > 1 else 0
            targets += following.tolist()
    # Every byte but the first of each document, and every separator, once.
    assert sorted(targets) == sorted(b for text in TEXTS[name] for b in (text.encode() + b"\0")[1:])
    return nats, len(targets), sum(b != 0 for b in targets)


def results(capsys, folder, *options):
    capsys.readouterr()
    words = [f"--source={name}=text:{folder}/{name}/*.txt" for name in TEXTS]
    main([*words, "--tokenizer", "bytes", "--precision", "fp32", "--json", *options])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mesh", ["", "cp=2,sp=2,tp=2", "pp=2,fsdp=4"])
def test_loss_is_that_of_the_logits_on_one_device(folder, log_probabilities, capsys, mesh):
    options = [str(FOLDER), "--seq-len", str(T)]
    options += ["--mesh", mesh] if mesh else []
    found = results(capsys, folder, *options)
    sums = [expected_source(folder, name, log_probabilities) for name in TEXTS]
    sums.append(np.sum(sums, axis=0).tolist())
    assert list(found["sources"]) == [*TEXTS, "all"]
    for (nats, tokens, text_bytes), row in zip(sums, found["sources"].values(), strict=True):
        assert row["tokens"] == tokens
        np.testing.assert_allclose(row["loss"], nats / tokens, rtol=1e-5)
        assert row["perplexity"] == math.exp(row["loss"])
        np.testing.assert_allclose(row["bits_per_byte"], nats / math.log(2) / text_bytes, rtol=1e-5)
    if not mesh:
        # The run's own tokenizer, precision and length; and the tables.
        assert results(capsys, folder, str(folder / "run"))["sources"] == found["sources"]
        main([str(folder / "run"), "--source", f"text:{folder}/one/*"])
        assert f"{found['sources']['one']['loss']:.4f}" in capsys.readouterr().out


def test_continuations_are_scored_by_the_logits_on_one_device(log_probabilities):
    model = opened(
        ScoreOptions(model=str(FOLDER), mesh="cp=2,sp=2,tp=2", tokenizer="bytes", precision="fp32")
    )
    pairs = [(list(context.encode()), list(text.encode())) for context, text in PAIRS]
    with jax.set_mesh(model.mesh):
        found = Scorer(model.cfg, model.params, model.tokenizer).continuations(pairs)
    each = [log_probabilities([*first, *ids])[len(first) - 1 :].sum() for first, ids in pairs]
    np.testing.assert_allclose([likelihood for likelihood, _ in found], each, rtol=1e-5)


@pytest.mark.parametrize("pair", [([1], [256]), ([-1], [2]), ([10**6, 1], [2])])
def test_token_ids_outside_the_vocabulary_are_not_scored(pair):
    cfg = Config(model=read_config(FOLDER), mesh=MeshConfig(fsdp=1))
    with jax.set_mesh(make_mesh(cfg.mesh, jax.devices()[:1])):
        model = jax.eval_shape(lambda key: Transformer(cfg.model, key), jax.random.key(0))
        scorer = Scorer(cfg, model, ByteTokenizer())
        with pytest.raises(UserError, match=r"pairs=.*: is outside .* vocabulary, 0 to 255; give"):
            scorer.continuations([([1], [2]), pair])


def test_without_a_document_mask_only_the_first_token_of_a_source_is_no_target(folder):
    data = DataConfig(seq_len=T, document_mask=False)
    cfg = Config(model=read_config(FOLDER), data=data)
    rows = list(source_rows(cfg, f"text:{folder}/*/*.txt"))
    stream = np.concatenate([rows[0]["tokens"][:1], *(row["targets"] for row in rows)])
    texts = [text.encode() for texts in TEXTS.values() for text in texts]
    assert sorted(bytes(stream.astype(np.uint8)).split(b"\0")) == sorted([*texts, b""])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "source=(): name text by --source, or --tasks TASK"),
        ("--source text:no/*", "source='text:no/*': no file with text matches"),
        ("--source synthetic", "source='synthetic': has no end"),
        ("--source text:one/* --source text:one/*", "name each: NAME=..."),
        ("--source text:one/* --seq-len 513", "seq_len=513: is longer than the 512 positions"),
        ("--source text:one/* --tokenizer words.json", "outside model.vocab_size=256; use a token"),
        ("--tasks t --mesh pp=2,fsdp=4", "mesh.pp=2: tasks are scored without a pipeline"),
        ("--source text:* --tokenizer ", "brings no tokenizer.json; name the model's own by --tok"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(folder, monkeypatch, capsys, words, said):
    monkeypatch.chdir(folder)
    large = tokenizers.models.WordLevel({"a": 300, "</s>": 1}, unk_token="a")
    made = tokenizers.Tokenizer(large)
    made.add_special_tokens(["</s>"])
    made.save("words.json")
    if "--tokenizer" not in words:
        words += " --tokenizer bytes"
    words = words.removesuffix(" --tokenizer ")  # of the model, which has none
    assert said in refused(capsys, "evaluate", FOLDER, *words.split())
