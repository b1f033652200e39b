"""A checkpoint's files are opened only if they are its own, plainly named, whole and consistent."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.files import (
    inside,
    is_huggingface,
    open_tensors,
    unread_files,
    weight_files,
)

INDEX = "model.safetensors.index.json"
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_all(folder):
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        return {name: files[name].get_slice(name)[:] for name in files}


def test_one_file_and_several_with_an_index_read_alike(tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir(), several.mkdir()
    save_file({"a": ROWS, "b": ROWS + 1}, one / "model.safetensors")
    save_file({"a": ROWS}, several / "x-1.safetensors")
    save_file({"b": ROWS + 1}, several / "x-2.safetensors")
    write_index(several, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    for folder in (one, several):
        tensors = read_all(folder)
        np.testing.assert_array_equal(tensors["a"], ROWS)
        np.testing.assert_array_equal(tensors["b"], ROWS + 1)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "..",
        "sub/model.safetensors",
        "/etc/passwd",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "model.safetensors\n",
        "model.safetensors\0",
        "https://host/model.safetensors",
        "",
        None,
        7,
        ["model.safetensors"],
    ],
)
def test_an_index_with_a_name_that_is_no_plain_file_name_is_refused(tmp_path, name):
    # The good file comes first and is not there: it would fail otherwise if anything were opened.
    write_index(tmp_path, {"good": "absent.safetensors", "bad": name})
    with pytest.raises(ValueError, match=r"weight_map\['bad'\]=.*plain name"):
        read_all(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match="weight_map="):
        weight_files(tmp_path)


@pytest.mark.parametrize("linked", ["model.safetensors", INDEX, "config.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, linked):
    folder, outside = tmp_path / "checkpoint", tmp_path / "outside"
    folder.mkdir()
    save_file({"a": ROWS}, outside)
    (folder / linked).symlink_to(outside)
    with pytest.raises(ValueError, match=r"link out of the checkpoint's folder"):
        inside(folder, linked)
    if linked != "config.json":
        with pytest.raises(ValueError, match=r"link out of the checkpoint's folder"):
            read_all(folder)


def test_a_link_out_of_the_folder_from_an_index_is_refused_before_anything_is_opened(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "x-1.safetensors").write_bytes(b"not a safetensors file: opening it would fail first")
    save_file({"b": ROWS}, tmp_path / "outside.safetensors")
    (folder / "x-2.safetensors").symlink_to(tmp_path / "outside.safetensors")
    write_index(folder, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    with pytest.raises(ValueError, match=r"x-2.*link out of the checkpoint's folder"):
        read_all(folder)


def test_links_inside_the_folder_and_those_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    save_file({"a": ROWS}, blobs / "0f00")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0f00"))
    np.testing.assert_array_equal(read_all(snapshot)["a"], ROWS)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"a": ROWS}, plain / "v1.safetensors")
    (plain / "model.safetensors").symlink_to("v1.safetensors")
    np.testing.assert_array_equal(read_all(plain)["a"], ROWS)


@pytest.mark.parametrize("name", ["x-1.safetensors", "model.fp16.safetensors"])
def test_safetensors_without_their_index_are_named(tmp_path, name):
    save_file({"a": ROWS}, tmp_path / name)
    with pytest.raises(
        ValueError, match=rf"holds neither .*; \['{name}'\] are read by an index alone"
    ):
        read_all(tmp_path)


def test_a_pointer_of_git_lfs_is_called_by_its_name(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(
        ValueError, match=r"model\.safetensors': is a pointer of Git LFS.*git lfs pull"
    ):
        read_all(tmp_path)


def test_folders_that_hold_no_model_themselves_are_called_by_their_kind(tmp_path):
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    for read in (is_huggingface, read_config):
        with pytest.raises(ValueError, match=r"path=.*adapters': holds adapters alone; merge them"):
            read(tmp_path / "adapters")
        with pytest.raises(
            ValueError, match=r"path=.*hub': is a cache of the Hub; name .*snapshots/abc"
        ):
            read(tmp_path / "hub")
    assert not is_huggingface(snapshot)


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*no other format"):
        read_all(tmp_path)


def test_a_cut_off_file_is_refused_by_its_path(tmp_path):
    save_file({"a": ROWS}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"model\.safetensors.*not a whole safetensors file"):
        read_all(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path):
    save_file({"a": ROWS}, tmp_path / "x-1.safetensors")
    write_index(tmp_path, {"a": "x-1.safetensors", "lost": "x-1.safetensors"})
    with pytest.raises(ValueError, match=r"\['lost'\].*missing from x-1"):
        read_all(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for number in (1, 2):
        save_file({"a": ROWS, f"b{number}": ROWS}, tmp_path / f"x-{number}.safetensors")
    write_index(tmp_path, {"b1": "x-1.safetensors", "b2": "x-2.safetensors"})
    with pytest.raises(ValueError, match=r"\['a'\].*another file"):
        read_all(tmp_path)


def test_one_whole_file_is_read_alone_and_the_files_of_an_index_are_told(tmp_path):
    save_file({"a": ROWS, "b": ROWS}, tmp_path / "model.safetensors")
    save_file({"a": ROWS + 1}, tmp_path / "x-1.safetensors")
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    np.testing.assert_array_equal(read_all(tmp_path)["a"], ROWS)
    told = f"model.safetensors is read, and not the 2 files of {INDEX}"
    assert unread_files(tmp_path) == [told]
    write_index(tmp_path, {"a": "model.safetensors", "b": "model.safetensors"})
    assert read_all(tmp_path).keys() == {"a", "b"} and unread_files(tmp_path) == []
    (tmp_path / INDEX).unlink()
    assert unread_files(tmp_path) == []


def test_an_index_that_lists_other_tensors_than_the_whole_file_is_refused(tmp_path):
    save_file({"a": ROWS}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "x-1.safetensors", "lost": "x-1.safetensors"})
    with pytest.raises(ValueError, match=r"\['lost'\].*missing from model\.safetensors, .* index"):
        read_all(tmp_path)


def test_an_index_that_gives_a_tensor_two_files_is_refused(tmp_path):
    for number in (1, 2):
        save_file({"a": ROWS}, tmp_path / f"x-{number}.safetensors")
    text = '{"weight_map": {"a": "x-1.safetensors", "a": "x-2.safetensors"}}'
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"gives 'a' two values, 'x-1.*' and 'x-2"):
        read_all(tmp_path)
