"""Fingerprints: equal on every mesh, different after any change, and nothing but sums between devices."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.checkpoint.fingerprint import all_sums, fingerprints
from ultrascale_jax.config import MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh

TYPES = ("float32", "bfloat16", "int8", "bool")
"""One of each size, and the one that is no number."""
LAYOUTS = [
    ({"fsdp": 8}, P("fsdp")),
    ({"fsdp": 2, "tp": 4}, P(None, "fsdp", "tp")),
    ({"fsdp": 2, "tp": 2, "pp": 2}, P("pp", "tp", "fsdp")),
    ({"fsdp": 4, "dp": 2}, P(None, None, ("dp", "fsdp"))),
    ({"dp": 8}, P()),
]


def random(dtype="float32", shape=(8, 16, 32)):
    bits = np.random.default_rng(3).integers(0, 256, (*shape, np.dtype(dtype).itemsize))
    if dtype == "bool":
        bits &= 1
    return bits.astype(np.uint8).view(dtype).reshape(shape)


def on(sizes, spec, x):
    mesh = make_mesh(MeshConfig.of(**sizes))
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_layout_of_every_type_has_the_fingerprint_of_one_device(dtype):
    x = random(dtype)
    expected = fingerprints({"x": x})
    assert all(fingerprints({"x": on(sizes, spec, x)}) == expected for sizes, spec in LAYOUTS)


def test_it_is_two_sums_of_bits_by_position():
    def mixed(n):
        n = (n ^ n >> 16) * 0x85EBCA6B % 2**32
        n = (n ^ n >> 13) * 0xC2B2AE35 % 2**32
        return n ^ n >> 16

    x = np.array([[1.5, -2.0], [np.nan, 0.0], [-0.0, 3.0]], np.float32)
    first = second = 0
    for (row, column), bits in np.ndenumerate(x.view(np.uint32)):
        position = mixed(mixed(x.size + row) + column)
        first += int(bits) * (position | 1)
        second += mixed(int(bits) ^ position)
    assert fingerprints({"x": x}) == {"x": f"{first % 2**32:08x}{second % 2**32:08x}"}


@settings(max_examples=100)
@given(place=st.integers(0, 8 * 16 * 32 * 4 - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_is_seen(place, bit):
    x = random()
    before = fingerprints({"x": x})
    x.reshape(-1).view(np.uint8)[place] ^= 1 << bit
    assert fingerprints({"x": x}) != before


def test_arrays_of_one_type_and_sharding_compile_once_and_keep_their_names():
    x = random(shape=(3, 8))
    tree = {"param": x, "step": x[0, 0], "moment": -x, "bias": x[0]}
    expected = {name: fingerprints({name: value})[name] for name, value in tree.items()}
    before = all_sums._cache_size()
    values = fingerprints({name: on({"dp": 8}, P(), value) for name, value in tree.items()})
    assert all_sums._cache_size() == before + 2  # step and bias; param, and again moment
    assert values == expected


def test_devices_exchange_nothing_but_sums():
    for layout in LAYOUTS[:3]:
        text = all_sums.lower([on(*layout, random())]).compile().as_text()
        collectives = re.findall(
            r"= (.+?) (all-[\w-]+|reduce-scatter|collective-[\w-]+|send|recv)\(", text
        )
        assert collectives and {kind for _, kind in collectives} == {"all-reduce"}
        sizes = re.findall(r"u32\[(\d*)\]", " ".join(shape for shape, _ in collectives))
        assert sizes and set(sizes) <= {"", "1", "2"}
