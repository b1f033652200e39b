"""`ultrascale plan memory --explain mesh`: what each axis splits, between which GPUs, over which link."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from ultrascale_jax.cli import plan
from ultrascale_jax.config import AXES, MeshConfig
from ultrascale_jax.configs.shapes import MIXTRAL_8X7B
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.sharding.mesh import make_mesh

BIG = ["llama3_70b", "--gpus", "64", "--mesh", "pp=2,fsdp=2,cp=2,sp=8", "--train.microbatches", "8"]
BIG += ["--train.remat", "full"]


def answer(capsys, *arguments: str) -> dict:
    plan.main(["memory", *arguments, "--explain", "mesh", "--json"])
    return json.loads(capsys.readouterr().out)["mesh"]


def test_an_axis_joins_the_devices_that_the_trainer_puts_along_it(capsys):
    mesh = "pp=2,fsdp=2,sp=2"
    found = answer(capsys, "debug", "--gpus", "8", "--mesh", mesh, "--train.microbatches", "2")
    devices = make_mesh(MeshConfig.parse(mesh), jax.devices()).devices
    ids = np.vectorize(lambda device: device.id)(devices)
    first = ids.min()
    for row in found["axes"]:
        place = [slice(None) if axis == row["axis"] else 0 for axis in AXES]
        assert row["group"] == (ids[tuple(place)] - first).tolist()
    assert [row["axis"] for row in found["axes"]] == ["pp", "fsdp", "sp"]


def test_links_are_those_of_the_groups(capsys):
    found = answer(capsys, *BIG)
    rows = {row["axis"]: row for row in found["axes"]}
    assert (found["nodes"], found["gpus_per_node"]) == (8, 8)
    assert {axis: (row["nodes"], row["gb_per_second"]) for axis, row in rows.items()} == {
        **{"pp": (2, 50.0), "fsdp": (4, 50.0), "cp": (2, 50.0)},
        "sp": (1, 450.0),
    }
    assert rows["sp"]["group"] == list(range(8)) and rows["pp"]["group"] == [0, 32]
    # ZeRO's shards are those of fsdp and cp together.
    assert rows["fsdp"]["group"] == [0, 8, 16, 24]
    assert rows["fsdp"]["splits"] == "batch, state by ZeRO-3 over fsdp*cp"
    # Hidden states of a layer, of the half of the sequence that cp leaves: four collectives in each pass, and three
    # again where `full` repeats the forward pass.
    tokens, layers, ticks = 32 * 8192 // 2, 80 // 2, 8 + 1  # the pipeline works in lock step
    assert rows["sp"]["sent_bytes"] == (8 + 3) * 2 * tokens * 8192 * 7 / 8 * layers * ticks


def test_zero_leaves_dp_its_shards_and_gathers_experts_over_fsdp_and_cp_alone(capsys):
    mesh = ["--mesh", "dp=2,fsdp=2,ep=4,cp=2", "--model.num-layers", "2", "--train.remat", "full"]
    run = ["--gpus", "32", "--train.global-batch", "32", "--train.microbatches", "1", *mesh]
    rows = {row["axis"]: row for row in answer(capsys, "mixtral_8x7b", *run)["axes"]}
    shape = ModelShape.of(dataclasses.replace(MIXTRAL_8X7B, num_layers=2))
    routed, dense = shape.routed_params, shape.num_params - shape.routed_params
    # A ring of two sends each float32 of a shard once to sum and once to gather: half of it each time.
    assert rows["dp"]["sent_bytes"] == pytest.approx(4 * (routed + dense) / 16)
    # Two gathers and a scatter of bfloat16; ep splits the experts already, which leaves 4 GPUs of 16.
    assert rows["fsdp"]["sent_bytes"] == pytest.approx(6 * (routed / 4 * 3 / 4 + dense * 15 / 16))
    assert rows["fsdp"]["splits"] == "batch, state by ZeRO-3 over fsdp*ep*cp"
    assert len(rows["fsdp"]["group"]) == 16 and len(rows["dp"]["group"]) == 2


def test_the_table_and_the_picture(capsys, tmp_path):
    path = tmp_path / "mesh.png"
    plan.main(["memory", *BIG, "--explain", "mesh", "--figure", str(path)])
    shown = capsys.readouterr().out
    assert "0, 1, ..., 7" in shown and "0, 32" in shown and "over 2 nodes" in shown
    assert shown.endswith(f"wrote {path}\n") and path.read_bytes()[:4] == b"\x89PNG"
    plan.main(["memory", "debug", "--gpus", "1", "--mesh", "fsdp=1", "--explain", "mesh"])
    assert capsys.readouterr().out.endswith("mesh dp=1 on 1 node of 8\n")
