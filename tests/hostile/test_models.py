"""Models in Hugging Face's formats that somebody else made."""

import json
import math
import os
import shutil
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.hostile.bent import BOUNDED, bent_bytes, bent_text, harmless
from ultrascale_jax.config import UserError
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.files import open_tensors, weight_files

FIXTURES = Path(__file__).parents[1] / "data" / "hf"
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
INDEX = "model.safetensors.index.json"

PICKLE = (
    b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
)
"""A pickle that makes `torch.load` run `true`."""


def read_all(folder):
    """Every tensor of a folder, every byte of it."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        return {name: np.array(files[name].get_slice(name)[:]) for name in files}


def with_header(header: bytes, body: bytes = ROWS.tobytes(), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def tensor(begin, end, shape=(3, 4), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS = {
    "a length of 2^63": with_header(b"{}", length=2**63),
    "a length of 100 MB": with_header(b"{}", length=100_000_000),
    "a length one too long": with_header(json.dumps({"a": tensor(0, 48)}).encode(), length=10**4),
    "overlapping offsets": with_header(
        json.dumps({"a": tensor(0, 48), "b": tensor(0, 48)}).encode()
    ),
    "a hole": with_header(
        json.dumps({"a": tensor(0, 24, (6,)), "b": tensor(40, 48, (2,))}).encode()
    ),
    "offsets past the end": with_header(json.dumps({"a": tensor(0, 4800, (30, 40))}).encode()),
    "negative offsets": with_header(json.dumps({"a": tensor(-48, 0)}).encode()),
    "offsets that run backwards": with_header(json.dumps({"a": tensor(48, 0)}).encode()),
    "a shape that does not fit": with_header(json.dumps({"a": tensor(0, 48, (5, 4))}).encode()),
    "a shape that wraps around": with_header(
        json.dumps({"a": tensor(0, 48, (2**62, 4, 12))}).encode()
    ),
    "a negative shape": with_header(json.dumps({"a": tensor(0, 48, (-3, -4))}).encode()),
    "an unknown type": with_header(json.dumps({"a": tensor(0, 48, dtype="O")}).encode()),
    "a header that is a list": with_header(b"[]"),
    "a header that is no text": with_header(b"\xff\xfe{}"),
    "a deep header": with_header(b"[" * 100_000),
    "nothing": b"",
    "a pickle": PICKLE,
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_file_with_a_false_header_is_refused_by_its_path(tmp_path, header):
    """Row 23."""
    (tmp_path / "model.safetensors").write_bytes(HEADERS[header])
    with (
        harmless(tmp_path),
        pytest.raises(ValueError, match=r"path='.*model\.safetensors': is not a whole"),
    ):
        read_all(tmp_path)


@pytest.mark.parametrize("shape", [(0, 2**62), (2**62, 0), (0,)])
def test_a_tensor_without_elements_is_refused_by_its_shape(tmp_path, shape):
    """Their product is that of the bytes, so the file is whole."""
    header = json.dumps({"a": tensor(0, 0, shape)}).encode()
    (tmp_path / "model.safetensors").write_bytes(with_header(header, b""))
    with harmless(tmp_path), pytest.raises(UserError, match=rf"^a\.shape=\[{shape[0]}"):
        read_all(tmp_path)


@BOUNDED
@given(data=st.data())
def test_a_file_that_was_bent_is_refused_or_gives_arrays(tmp_path, data):
    """Row 23."""
    save_file({"a": ROWS, "b": ROWS.astype(np.float16)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    if data.draw(st.booleans()):
        header = json.loads(content[8 : 8 + size])
        content = with_header(data.draw(bent_text(header)), content[8 + size :])
    else:
        content = data.draw(bent_bytes(content))
    (tmp_path / "model.safetensors").write_bytes(content)
    with harmless(tmp_path):
        assert sum(array.nbytes for array in read_all(tmp_path).values()) <= len(content)


@BOUNDED
@given(data=st.data())
def test_an_index_that_was_bent_is_refused_or_opens_files_of_its_own_folder(tmp_path, data):
    """Row 23."""
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in (1, 2):
        save_file({f"t{number}": ROWS}, folder / f"x-{number}.safetensors")
    (folder / "pytorch_model.bin").write_bytes(PICKLE)
    index = {"metadata": {}, "weight_map": {"t1": "x-1.safetensors", "t2": "x-2.safetensors"}}
    (folder / INDEX).write_bytes(data.draw(bent_text(index)))
    with harmless(tmp_path):
        assert all(not {"/", "\\"} & set(name) for name in weight_files(folder))
        read_all(folder)


@BOUNDED
@given(data=st.data(), family=st.sampled_from(sorted(path.name for path in FIXTURES.iterdir())))
def test_a_config_that_was_bent_is_refused_or_a_model(tmp_path, data, family):
    """Row 23."""
    config = json.loads((FIXTURES / family / "config.json").read_text())
    (tmp_path / "config.json").write_bytes(data.draw(bent_text(config)))
    with harmless(tmp_path):
        read_config(tmp_path)


ROPE = {"rope_type": "linear", "factor": 5e-324}
NUMBERS = {
    "a factor that divides to infinity": ({"rope_scaling": ROPE}, "^factor="),
    "a factor whose logarithm is negative": (
        {"rope_scaling": {**ROPE, "rope_type": "yarn", "factor": math.exp(-10)}},
        r"^rope_scaling\.factor=",
    ),
    "a base without logarithm": (
        {"rope_theta": 1, "rope_scaling": {**ROPE, "rope_type": "yarn", "factor": 4}},
        r"^model\.rope_theta=",
    ),
    "a base of 4,000 digits": ({"rope_theta": 10**4000}, "^rope_theta=1000"),
    "a base that float32 does not hold": ({"rope_theta": 1e300}, "^rope_theta="),
    "an eps that float32 does not hold": ({"rms_norm_eps": 1e-50}, "^rms_norm_eps="),
    "a width of 4,000 digits": ({"hidden_size": 10**4000}, "^hidden_size=1000"),
    "a length of 20 digits": (
        {"max_position_embeddings": 10**20, "rope_scaling": {**ROPE, "factor": 2}},
        "^max_position_embeddings=",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_no_model_has_is_refused_by_its_key(tmp_path, name):
    changes, said = NUMBERS[name]
    config = json.loads((FIXTURES / "llama3" / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with harmless(tmp_path), pytest.raises(UserError, match=said) as refused:
        read_config(tmp_path)
    assert len(str(refused.value)) < 1200


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_too_large_or_with_an_integer_too_long_is_refused_by_its_path(tmp_path, name):
    """Python reads no integer of more than 4,300 digits."""
    path = tmp_path / name
    read = {"config.json": read_config, INDEX: weight_files}[name]
    path.write_text('{"hidden_size": 1%s}' % ("0" * 5000))
    with (
        harmless(tmp_path),
        pytest.raises(UserError, match=rf"^path='.*{name}': is not JSON .*digits\)$"),
    ):
        read(tmp_path)
    os.truncate(path, 20_000_000_000)
    with harmless(tmp_path), pytest.raises(UserError, match=rf"{name}': has more than [\d,]+ byt"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.bin", "../m.safetensors", "sub/m.safetensors", "/m.safetensors"]
)
def test_an_index_that_names_anything_but_a_file_of_its_folder_is_refused(tmp_path, name):
    """Row 23: a `.bin` pickle, or a way out."""
    (tmp_path / "model.bin").write_bytes(PICKLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with harmless(tmp_path), pytest.raises(ValueError, match=r"plain name of a \.safetensors file"):
        read_all(tmp_path)


def test_a_model_that_brings_code_is_refused(tmp_path):
    """Row 23: `auto_map` names code of the folder."""
    config = json.loads((FIXTURES / "llama3" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with harmless(tmp_path), pytest.raises(ValueError, match="auto_map="):
        read_config(tmp_path)
