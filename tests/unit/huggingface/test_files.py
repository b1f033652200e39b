"""A checkpoint's files are opened only if they are its own, plainly named, whole and consistent."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ultrascale_jax.config import UserError
from ultrascale_jax.huggingface.files import inside, open_tensors, unread_files

INDEX = "model.safetensors.index.json"
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
ONE, TWO = "x-1.safetensors", "x-2.safetensors"


def write(folder, files, weight_map=None):
    """Write tensors of `ROWS` by the names of their files, and an index."""
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(dict.fromkeys(tensors, ROWS), folder / name)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_all(folder):
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        return {name: files[name].get_slice(name)[:] for name in files}


def test_one_file_and_several_with_an_index_read_alike(tmp_path):
    write(tmp_path / "one", {"model.safetensors": "ab"})
    write(tmp_path / "several", {ONE: "a", TWO: "b"}, {"a": ONE, "b": TWO})
    for name in ("one", "several"):
        tensors = read_all(tmp_path / name)
        assert tensors.keys() == {"a", "b"}
        np.testing.assert_array_equal(tensors["b"], ROWS)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.mark.parametrize(
    ("files", "weight_map", "said"),
    [
        ({}, [], "weight_map="),
        ({}, {}, "weight_map="),
        ({ONE: "a"}, None, rf"holds neither .*; \['{ONE}'\] are read by an index alone"),
        ({ONE: "a"}, {"a": ONE, "lost": ONE}, r"\['lost'\].*missing from x-1"),
        ({ONE: "ab", TWO: "ac"}, {"b": ONE, "c": TWO}, r"\['a'\].*another file"),
        (
            {"model.safetensors": "a"},
            {"a": ONE, "lost": ONE},
            r"\['lost'\].*missing from model\.safetensors, .* index",
        ),
    ],
)
def test_files_and_an_index_that_do_not_fit_are_refused(tmp_path, files, weight_map, said):
    write(tmp_path, files, weight_map)
    with pytest.raises(UserError, match=said):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", LFS.encode(), "is a pointer of Git LFS.*git lfs pull"),
        ("model.safetensors", b"\x40", r"model\.safetensors.*no complete safetensors file"),
        ("pytorch_model.bin", b"cos\nsystem\n", r"neither model\.safetensors nor .*other format"),
        (INDEX, b'{"weight_map": {"a": "x", "a": "y"}}', "gives 'a' two values, 'x' and 'y'"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_name(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_all(tmp_path)


@pytest.mark.parametrize("linked", ["model.safetensors", INDEX, "config.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, linked):
    folder, outside = tmp_path / "checkpoint", tmp_path / "outside"
    folder.mkdir()
    save_file({"a": ROWS}, outside)
    (folder / linked).symlink_to(outside)
    with pytest.raises(UserError, match=r"link out of the checkpoint's folder"):
        inside(folder, linked)
    if linked != "config.json":
        with pytest.raises(UserError, match=r"link out of the checkpoint's folder"):
            read_all(folder)


def test_links_inside_the_folder_and_those_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    save_file({"a": ROWS}, blobs / "0f00")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0f00"))
    write(tmp_path / "plain", {"v1.safetensors": "a"})
    (tmp_path / "plain" / "model.safetensors").symlink_to("v1.safetensors")
    for folder in (snapshot, tmp_path / "plain"):
        np.testing.assert_array_equal(read_all(folder)["a"], ROWS)


def test_one_whole_file_is_read_alone_and_the_files_of_an_index_are_told(tmp_path):
    write(tmp_path, {"model.safetensors": "ab", ONE: "a"}, {"a": ONE, "b": TWO})
    assert read_all(tmp_path).keys() == {"a", "b"}
    told = f"model.safetensors is read, and not the 2 files of {INDEX}"
    assert unread_files(tmp_path) == [told]
    write(tmp_path, {}, {"a": "model.safetensors", "b": "model.safetensors"})
    assert read_all(tmp_path).keys() == {"a", "b"} and unread_files(tmp_path) == []
    (tmp_path / INDEX).unlink()
    assert unread_files(tmp_path) == []
