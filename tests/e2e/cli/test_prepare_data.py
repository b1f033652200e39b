"""`ultrascale prepare-data`: documents into shards, from every kind of file, and again after a crash."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.commands import ultrascale
from tests.corpora import contents
from tests.tokenizers import write_tokenizer
from ultrascale_jax.cli.prepare_data import Options, prepare
from ultrascale_jax.config import DataConfig, UserError
from ultrascale_jax.data.corpus import open_shards
from ultrascale_jax.data.shards import IndexWriter, load_index
from ultrascale_jax.data.sources import open_sources
from ultrascale_jax.data.tokenizer import ByteTokenizer, JsonTokenizer

TEXTS = [f"document {i}: {'caf\u00e9 ' * (i % 7)}\n" for i in range(40)]


def json_lines(texts):
    return "".join(json.dumps({"text": text, "body": "other"}) + "\n" for text in texts).encode()


def zstd(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def write_inputs(folder):
    """The documents in every kind of file, in order; returns the pattern that matches all files."""
    folder.mkdir()
    for i, text in enumerate(TEXTS[:5]):
        (folder / f"a{i}.txt").write_text(text)
    (folder / "b.txt.gz").write_bytes(gzip.compress(TEXTS[5].encode()))
    # Two members, and two frames: as tools that compress in parallel write them.
    members = [gzip.compress(json_lines(part)) for part in (TEXTS[6:8], TEXTS[8:10])]
    (folder / "c.json.gz").write_bytes(b"".join(members))
    frames = [zstd(json_lines(part)) for part in (TEXTS[10:12], TEXTS[12:15])]
    (folder / "d.jsonl.zst").write_bytes(b"".join(frames))
    (folder / "e.jsonl").write_bytes(json_lines(TEXTS[15:25]))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[25:]}), folder / "f.parquet")
    return f"{folder}/*"


def read_documents(out, tokenizer):
    corpus = open_shards(out, tokenizer.vocab_size, tokenizer.fingerprint)
    spans = zip(corpus.starts.tolist(), corpus.ends.tolist(), strict=True)
    return [corpus.read(*span).tolist() for span in spans]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Arguments of a run, and what it wrote."""
    folder = tmp_path_factory.mktemp("finished")
    pattern = write_inputs(folder / "in")
    args = Options(input=pattern, out=folder / "out", workers=1, shard_tokens=200)
    prepare(args)
    return args, contents(args.out)


def test_every_kind_of_file_becomes_the_same_documents_in_order(finished):
    args, _ = finished
    index = load_index(args.out)
    assert read_documents(args.out, ByteTokenizer()) == [[*text.encode(), 0] for text in TEXTS]
    assert index.shards.size > 3
    assert index.shards["tokens"].max() <= 200
    assert index.shards["documents"].sum() == len(TEXTS)


def test_the_output_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    pattern = write_inputs(tmp_path / "in")
    monkeypatch.setattr("ultrascale_jax.data.tokenizing.GROUP_BYTES", 100)
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        prepare(Options(input=pattern, out=out, train_bpe=300, workers=workers, shard_tokens=200))
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    tokenizer = JsonTokenizer(tmp_path / "out1" / "tokenizer.json")
    documents = read_documents(tmp_path / "out1", tokenizer)
    assert [tokenizer.decode(document[:-1]) for document in documents] == TEXTS
    assert {document[-1] for document in documents} == {tokenizer.eos}


def test_a_given_tokenizer_is_used_and_copied_beside_the_shards(finished, tmp_path):
    args = replace(finished[0], out=tmp_path / "trained", train_bpe=300)
    prepare(args)
    given = tmp_path / "trained" / "tokenizer.json"
    index = prepare(replace(args, out=tmp_path / "out", train_bpe=0, tokenizer=str(given)))
    assert index.dtype == "uint16"
    copy = JsonTokenizer(tmp_path / "out" / "tokenizer.json")
    assert read_documents(tmp_path / "out", copy) == read_documents(tmp_path / "trained", copy)


def test_shards_say_how_documents_begin_and_end_and_a_run_does_it_alike(tmp_path, capsys):
    added, config = {"<s>": True, "</s>": True}, {"eos_token": "</s>", "chat_template": "a"}
    path = write_tokenizer(tmp_path / "hf", added, config, "<s> $A")
    (tmp_path / "a.txt").write_text("hi </s>")
    words = ["--input", f"{tmp_path}/a.txt", "--workers", "1", "--tokenizer", str(path.parent)]
    typed = JsonTokenizer(path).encode("</s>", begins=False)
    for kind, begins, inside in (("bos", [256], typed), ("none", [], typed), ("all", [256], [257])):
        out = tmp_path / kind
        ultrascale("prepare-data", *words, "--out", out, "--special-tokens", kind)
        told = capsys.readouterr().out
        first = "'<s>' (256)" if begins else "its text"
        assert f"begins with {first}, and ends with '</s>' (257), eos_token of" in told
        assert f"--data.source tokens:{out} --data.tokenizer" in told
        assert ("--data.special-tokens " + kind in told) == (kind != "bos")
        data = DataConfig(source=f"tokens:{out}", tokenizer=str(out), special_tokens=kind)
        [corpus] = open_sources(data, 300).corpora
        tokens = corpus.read(0, int(corpus.ends[0])).tolist()
        hi = JsonTokenizer(path).encode("hi ", begins=False)
        assert tokens == [*begins, *hi, *inside, 257]
        # The same text in memory, with the tokenizer beside the shards.
        memory = replace(data, source=f"text:{tmp_path}/a.txt")
        [corpus] = open_sources(memory, 300).corpora
        assert corpus.read(0, len(tokens)).tolist() == tokens
        other = replace(data, special_tokens="none" if kind == "all" else "all")
        with pytest.raises(UserError, match=rf"and data\.special_tokens={kind}"):
            open_sources(other, 300)


@pytest.mark.parametrize(
    "interrupt",
    ["unfinished", "no index", "truncated shard", "altered shard", "missing documents", "finished"],
)
def test_a_restart_keeps_whole_shards_and_ends_with_the_same_files(finished, interrupt):
    args, expected = finished
    names = sorted(name for name in expected if name.endswith(".tokens"))
    kept = 2
    if interrupt == "no index":
        (args.out / "index.json").unlink()
        kept = 0
    elif interrupt == "unfinished":
        index = load_index(args.out)
        first = replace(index, shards=index.shards[:2])
        IndexWriter(args.out, first).save(complete=False)
        for name in names[2:]:
            (args.out / name).unlink()
        (args.out / names[2]).write_bytes(b"half")
    elif interrupt == "truncated shard":
        (args.out / names[2]).write_bytes(expected[names[2]][:-1])
    elif interrupt == "altered shard":
        (args.out / names[2]).write_bytes(expected[names[2]][::-1])
    elif interrupt == "missing documents":
        (args.out / names[2].replace("tokens", "documents")).unlink()
    else:
        kept = len(names)
    before = {name: (args.out / name).stat().st_ino for name in names[:kept]}
    prepare(args)
    assert contents(args.out) == expected
    assert before == {name: (args.out / name).stat().st_ino for name in names[:kept]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shard_tokens": 300}, "has shards made with other settings; remove it"),
        ({"text_field": "body"}, "has shards made with other settings; remove it"),
        ({"train_bpe": 300}, "has shards made with other settings; remove it"),
        ({"input": "in/*.jsonl"}, "shard_00000 was made of other documents; remove it"),
        ({"input": "in/a*"}, "shard_00000 was made of other documents; remove it"),
        ({"input": "more/*"}, "is finished, but the input has more documents; remove it"),
    ],
)
def test_a_restart_with_other_input_or_settings_is_refused_and_changes_nothing(
    finished, monkeypatch, change, said
):
    args, expected = finished
    monkeypatch.chdir(args.out.parent)
    if change.get("input") == "more/*":
        write_inputs(Path("more"))
        Path("more/g.txt").write_text("one more")
    with pytest.raises(UserError, match=said):
        prepare(replace(args, **change))
    assert contents(args.out) == expected


def test_a_document_longer_than_a_shard_gets_its_own(tmp_path):
    for name, size in {"a": 5, "b": 50, "c": 5}.items():
        (tmp_path / f"{name}.txt").write_text("x" * size)
    args = Options(input=f"{tmp_path}/*", out=tmp_path / "out", workers=1, shard_tokens=20)
    assert prepare(args).shards["tokens"].tolist() == [6, 51, 6]
    assert np.diff(open_shards(tmp_path / "out", 256, "bytes").ends).tolist() == [51, 6]
