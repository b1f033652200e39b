"""Copies that differ are found by the device that has them, and a suspicious step is taken twice."""

import re
import socket
import weakref

import jax
import numpy as np
import pytest

from tests.faults import inject
from tests.faults.tiny import config as TINY
from tests.runs import change, in_folder, mesh_of, run, step_rows
from tests.states import some_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.config import Experts
from ultrascale_jax.health.replicas import Replicas, ReplicasDiffer, _fingerprints
from ultrascale_jax.hooks import Hook
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.exit_codes import CRASHED

BASE = change(TINY, mesh={"fsdp": 1}, model={"num_layers": 1}, optim={"warmup_steps": 0})


def losses(folder):
    return [row["loss"].hex() for row in step_rows(folder)]


class FirstState(Hook):
    """Finds out whether something still holds the state that the run began with."""

    def on_start(self, run):
        self._norm = weakref.ref(run.state.params.final_norm[...])

    def before_step(self, run):
        self.is_kept = self._norm() is not None


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
    "hybrid": {"mesh": {"fsdp": 2, "dp": 4}},
    "pipelines": {
        "mesh": {"pp": 2, "dp": 4},
        "model": {"num_layers": 3},
        "train": {"microbatches": 2},
    },
    "experts": {"mesh": {"ep": 2, "dp": 4}, "model": {"experts": Experts(num=4, top_k=2)}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["dp over tp", pytest.param("hybrid", marks=pytest.mark.wide), "pipelines", "experts"],
)
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


@pytest.mark.slow
def test_the_share_that_has_copies_is_known(tmp_path):
    for sizes, share in (({"dp": 2}, "100.0%"), ({"fsdp": 8}, "0.7%"), ({}, "0.0%")):
        cfg = change(BASE, mesh=sizes)
        mesh = mesh_of(cfg)
        with jax.set_mesh(mesh):
            state = some_state(cfg, mesh)
            replicas = Replicas(mesh, state, Events(tmp_path, 0))
            replicas.check(1, state)
        assert f"{replicas.copied_share:.1%}" == share


# Implied by test_every_flipped_bit_is_found_with_its_device_and_array and by faults/test_numbers.py.
@pytest.mark.wide
@pytest.mark.slow
def test_trained_copies_stay_equal_and_a_flip_stops_the_run_before_it_is_saved(tmp_path):
    """Row 18: every number of the state is computed to the same bits on all copies, until a device errs."""
    cfg = change(BASE, mesh={"dp": 2, "fsdp": 2, "tp": 2}, watch={"replicas_every": 3})
    folder = tmp_path / "run"
    with pytest.raises(
        ReplicasDiffer, match=r"not equal after step 8: device 0 .*final_norm"
    ) as stop:
        run(cfg, folder, ("flip", 7))
    assert stop.value.exit_code == CRASHED
    with Checkpoints(in_folder(cfg, folder)) as checkpoints:
        assert checkpoints.latest == 4
    run(cfg, folder)
    run(cfg, tmp_path / "sound")
    assert losses(folder) == losses(tmp_path / "sound") and len(losses(folder)) == 12


# Implied by faults/test_numbers.py.
@pytest.mark.wide
@pytest.mark.slow
def test_a_transient_fault_is_told_and_leaves_no_trace(tmp_path):
    """The second result of the step is taken, so the run goes on as if nothing had been."""
    watch = {"rerun": True, "spike_sigma": 40.0, "spike_window": 4}
    cfg = change(BASE, mesh={"fsdp": 2}, watch=watch)
    first_state = FirstState()
    run(cfg, tmp_path / "faulty", ("nan", 6), ("spike", 9), hooks=[first_state])
    assert not first_state.is_kept
    run(cfg, tmp_path / "sound")
    assert losses(tmp_path / "faulty") == losses(tmp_path / "sound")
    told = [e for e in read_events(tmp_path / "faulty") if e["kind"] == "rerun"]
    assert [(e["step"], e["verdict"], e["skipped"]) for e in told] == [
        (step, "transient", [True, False]) for step in (6, 9)
    ]
    assert all(event["kind"] != "rerun" for event in read_events(tmp_path / "sound"))


@pytest.mark.wide
def test_a_fault_that_comes_back_is_persistent_and_the_step_is_skipped(tmp_path):
    """A model that has diverged gives the same bits twice."""
    cfg = change(BASE, watch={"rerun": True}, optim={"lr": 1e30, "clip_norm": 0.0})
    cfg = change(cfg, train={"steps": 4})
    summary = run(cfg, tmp_path / "run")
    verdicts = [e["verdict"] for e in read_events(tmp_path / "run") if e["kind"] == "rerun"]
    assert summary["skipped"] == len(verdicts) > 0 and set(verdicts) == {"persistent"}
