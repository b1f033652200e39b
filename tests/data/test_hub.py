"""Datasets that Hugging Face `datasets` streams, from folders of files: the code is that of the Hub's."""

import json
from dataclasses import replace

import pyarrow.parquet
import pytest

from tests.cli.test_prepare_data import TEXTS, contents, read_documents
from tests.data.test_chat import CHAT, bpe, make_folder, write_talks  # noqa: F401
from ultrascale_jax.cli.prepare_data import Args, prepare
from ultrascale_jax.config import UserError
from ultrascale_jax.data import hub
from ultrascale_jax.data.hub import HubDataset
from ultrascale_jax.data.shards import IndexWriter, load_index
from ultrascale_jax.data.tokenizer import ByteTokenizer

pytest.importorskip("datasets", reason="the package datasets is of the extra hf")

ROWS = [{"id": i, "text": TEXTS[i % 40] if i % 5 else ""} for i in range(240)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A dataset of three files of 80 rows, some without text; a stream knows its place every 16 documents."""
    monkeypatch.setattr("ultrascale_jax.cli.prepare_data.GROUP_BYTES", 100)
    monkeypatch.setattr(hub, "ROWS", 4)
    monkeypatch.setattr(hub, "EVERY", 16)
    folder = tmp_path / "dataset"
    folder.mkdir()
    for number in range(3):
        write_lines(folder / f"train-{number}.jsonl", ROWS[80 * number : 80 * number + 80])
    return folder


def arguments(folder, out, **changes):
    options = {"input": f"hf:{folder}", "out": out, "workers": 1, "shard_tokens": 900}
    return Args(**{**options, **changes})


def test_a_dataset_becomes_the_shards_that_its_files_become(folder, tmp_path):
    index = prepare(arguments(folder, tmp_path / "out"))
    prepare(arguments(folder, tmp_path / "files", input=f"{folder}/*.jsonl"))
    out = contents(tmp_path / "out")
    assert len(index.shards) > 3 and json.loads(out.pop("stream.json"))["documents"] > 100
    assert out == contents(tmp_path / "files")
    rows = pyarrow.table({"body": [row["text"] for row in ROWS], "id": [row["id"] for row in ROWS]})
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(rows, tmp_path / "parquet" / "validation.parquet")
    text = f"hf:{tmp_path}/parquet::validation"
    prepare(arguments(folder, tmp_path / "other", input=text, text_field="body"))
    documents = read_documents(tmp_path / "other", ByteTokenizer())
    assert documents == read_documents(tmp_path / "out", ByteTokenizer())


def test_a_folder_with_an_at_sign_or_a_colon_is_that_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a@v1", "b:c"):
        (tmp_path / name).mkdir()
        assert HubDataset.parse(f"hf:{name}") == HubDataset(name)
    assert HubDataset.parse("hf:a@v2:x") == HubDataset("a", "v2", "x")
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"a@v1 and a are both folders; write hf:a@v1/$"):
        HubDataset.parse("hf:a@v1")
    assert HubDataset.parse("hf:a@v1/") == HubDataset("a@v1/")
    with pytest.raises(UserError, match="a is a folder, which has no revisions; leave out @v2"):
        HubDataset.parse("hf:a@v2")


def test_a_folder_that_cannot_be_streamed_is_one_error(tmp_path):
    for name in ("d[1]", "d*", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"text": "a"}', encoding="utf-16")
    for name in ("d[1]", "d*"):
        with pytest.raises(UserError, match=r"has one of \*\?\[, .* rename it"):
            HubDataset(f"{tmp_path}/{name}").open()
    with pytest.raises(UserError, match=r"input='hf:.*/other::train': cannot be read \("):
        HubDataset(f"{tmp_path}/other").first()


def test_a_stream_that_broke_off_goes_on_without_what_came_before(folder, tmp_path):
    prepare(arguments(folder, tmp_path / "straight"))
    last = folder / "train-2.jsonl"
    rest = last.read_text()
    write_lines(last, [*ROWS[160:200], {"id": 200, "text": None}])
    args = arguments(folder, tmp_path / "out")
    with pytest.raises(UserError, match=r"row 201 has no text in 'text'"):
        prepare(args)
    before = load_index(tmp_path / "out").shards["documents"].sum()
    place = json.loads((tmp_path / "out" / "stream.json").read_text())
    assert 0 < before - place["documents"] <= 16 + 4
    last.write_text(rest)
    # The rows before the place are not read again: they are others now.
    write_lines(folder / "train-0.jsonl", ROWS[7:87])
    prepare(args)
    assert prepare(args).complete
    left, expected = (contents(tmp_path / name) for name in ("out", "straight"))
    del left["stream.json"], expected["stream.json"]
    assert left == expected


@pytest.mark.parametrize("change", ["other rows", "other input", "damaged", "no place"])
def test_a_stream_that_is_not_the_one_before_is_refused_and_without_a_place_read_again(
    folder, tmp_path, change
):
    args = arguments(folder, tmp_path / "out")
    prepare(args)
    expected = contents(tmp_path / "out")
    if change == "no place":
        (tmp_path / "out" / "stream.json").unlink()
        assert prepare(args).complete
        return
    said = "is damaged; remove it to read the input from its beginning"
    if change == "other rows":
        index = load_index(tmp_path / "out")
        IndexWriter(tmp_path / "out", replace(index, shards=index.shards[:2])).save(complete=False)
        write_lines(folder / "train-0.jsonl", ROWS[7:87])
        said = "shard_00000 was made of other documents; remove it"
    elif change == "other input":
        folder.rename(tmp_path / "moved")
        args = arguments(tmp_path / "moved", tmp_path / "out")
        said = "is the place of another input; remove the folder"
    else:
        content = json.loads(expected["stream.json"])
        (tmp_path / "out" / "stream.json").write_text(json.dumps({**content, "more": 1}))
    with pytest.raises(UserError, match=said):
        prepare(args)


def test_rows_of_conversations_become_what_json_lines_of_them_do(bpe, tmp_path):  # noqa: F811
    path = make_folder(bpe, tmp_path / "hf", CHAT)
    (tmp_path / "talks").mkdir()
    write_talks(tmp_path / "talks")
    options = {"tokenizer": str(path.parent), "workers": 1, "shard_tokens": 30}
    found = []
    for name, text in {"a": f"hf:{tmp_path}/talks", "b": f"{tmp_path}/talks/a.jsonl"}.items():
        index = prepare(Args(input=text, out=tmp_path / name, **options))
        assert index.settings["chat"] and index.shards["answers_sha256"].any()
        found.append(contents(tmp_path / name))
    del found[0]["stream.json"]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:org/name", HubDataset("org/name")),
        ("hf:org/name@v1.2:en", HubDataset("org/name", "v1.2", "en")),
        ("hf:name::test", HubDataset("name", None, None, "test")),
        ("hf:/a/b:c:validation", HubDataset("/a/b", None, "c", "validation")),
    ],
)
def test_a_dataset_has_a_name_a_revision_a_configuration_and_a_split(text, expected):
    assert HubDataset.parse(text) == expected == HubDataset.parse(str(expected))


@pytest.mark.parametrize("text", ["hf:", "hf:a@", "hf:a:b:train[:10%]", "hf:a:b:c:d"])
def test_another_form_is_refused(text):
    with pytest.raises(UserError, match=r"^input='hf:.*': write hf:NAME\[@REVISION\]"):
        HubDataset.parse(text)


def test_a_dataset_that_is_not_there_and_a_field_that_no_row_has_are_refused(folder, tmp_path):
    for changes, said in (
        ({"input": f"hf:{folder}/no"}, r"^input='hf:.*/no::train': cannot be opened \("),
        ({"input": f"hf:{folder}::test"}, r"cannot be opened \(Bad split: test"),
        ({"text_field": "body"}, r"row 1 has no text in 'body' but in \['text'\]; give another"),
    ):
        with pytest.raises(UserError, match=said):
            prepare(arguments(folder, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
