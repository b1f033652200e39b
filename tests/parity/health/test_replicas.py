"""Copies that differ are found by the device that has them."""

import re
import socket

import jax
import numpy as np
import pytest

from tests.faults import inject
from tests.faults.tiny import config as TINY
from tests.runs import change, mesh_of
from tests.states import some_state
from ultrascale_jax.config import Experts
from ultrascale_jax.health.replicas import Replicas, ReplicasDiffer, _fingerprints
from ultrascale_jax.launch.events import Events, read_events

BASE = change(TINY, mesh={"fsdp": 1}, model={"num_layers": 1}, optim={"warmup_steps": 0})


def with_piece_on(array, number, turn):
    """`array` with `turn` done to the bits of its piece on device `number`."""

    def piece(shard):
        value = np.array(shard.data)
        if shard.device.id == number:
            turn(value.reshape(-1).view(np.uint32))
        return jax.device_put(value, shard.device)

    pieces = [piece(shard) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def replaced(state, old, new):
    return jax.tree.map(lambda leaf: new if leaf is old else leaf, state)


MESHES = {
    "dp over tp": {"mesh": {"dp": 4, "tp": 2}},
    "pipelines of experts": {
        "mesh": {"pp": 2, "dp": 4},
        "model": {"num_layers": 3, "experts": Experts(num=4, top_k=2)},
        "train": {"microbatches": 2},
    },
}


@pytest.mark.parametrize("name", MESHES)
def test_every_flipped_bit_is_found_with_its_device_and_array(tmp_path, name):
    """Row 18, in parameters, moments and counters, in pieces as well as in what is whole."""
    cfg = change(BASE, **MESHES[name])
    mesh, events = mesh_of(cfg), Events(tmp_path, 0)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        replicas = Replicas(mesh, state, events)
        replicas.check(1, state)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        for n in rng.choice(len(leaves), 6, replace=False):
            (path, leaf), device, bit = leaves[n], int(rng.integers(8)), int(rng.integers(32))

            def turn(bits, bit=bit):
                bits[rng.integers(bits.size)] ^= 1 << bit

            bad = replaced(state, leaf, with_piece_on(leaf, device, turn))
            with pytest.raises(ReplicasDiffer, match=rf"step 2: device {device} of process 0 on "):
                replicas.check(2, bad)
            event = read_events(tmp_path)[-1]
            [found] = event["devices"]
            where = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            assert (found["device"], found["arrays"]) == (device, [where])
            assert found["host"] == socket.gethostname() and event["certain"]


def test_of_two_copies_both_are_named(tmp_path):
    cfg = change(BASE, mesh={"dp": 2})
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        replicas = Replicas(mesh, state, Events(tmp_path, 0))
        assert replicas.copied_share == 1.0
        with pytest.raises(
            ReplicasDiffer, match=r"device 0 of .*device 1 of .*nothing tells which"
        ):
            replicas.check(1, inject.flipped(state))
    [event] = read_events(tmp_path)
    assert [found["device"] for found in event["devices"]] == [0, 1] and not event["certain"]


def test_nothing_but_fingerprints_travels():
    cfg = change(BASE, mesh={"dp": 2, "fsdp": 2, "tp": 2})
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        program = _fingerprints.lower(state).compile().as_text()
    count = len(jax.tree.leaves(state))
    kinds = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    sent = re.findall(rf"= (\S+?)\{{\S* (?:{kinds})(?:-start)?\(", program)
    assert sent == [f"u32[8,{count},2]"]


def test_the_share_that_has_copies_is_known(tmp_path):
    for sizes, share in (({"fsdp": 8}, "0.7%"), ({}, "0.0%")):
        cfg = change(BASE, mesh=sizes)
        mesh = mesh_of(cfg)
        with jax.set_mesh(mesh):
            state = some_state(cfg, mesh)
            replicas = Replicas(mesh, state, Events(tmp_path, 0))
            replicas.check(1, state)
        assert f"{replicas.copied_share:.1%}" == share
