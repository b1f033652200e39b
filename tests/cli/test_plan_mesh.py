"""`ultrascale plan mesh`: what each axis splits, between which GPUs, over which link."""

import json

import jax
import numpy as np
import pytest

from ultrascale_jax.cli import plan
from ultrascale_jax.config import AXES, MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh

BIG = ["llama3_70b", "--gpus", "64", "--mesh", "pp=2,fsdp=2,cp=2,sp=8", "--train.microbatches", "8"]
BIG += ["--train.remat", "full"]


def answer(capsys, *arguments: str) -> dict:
    plan.main(["mesh", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


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
    assert (found["nodes"], found["gpus_per_node"], found["schema"]) == (8, 8, 1)
    assert {axis: (row["nodes"], row["gbs"]) for axis, row in rows.items()} == {
        **{axis: (2, 50.0) for axis in ("pp", "fsdp", "cp")},
        "sp": (1, 450.0),
    }
    assert rows["sp"]["group"] == list(range(8)) and rows["pp"]["group"] == [0, 32]
    assert rows["fsdp"]["splits"] == "batch, state by ZeRO-3"
    # Four collectives of hidden states a layer and pass, of the half of the sequence that cp leaves.
    tokens, layers, microbatches = 32 * 8192 // 2, 80 // 2, 8
    assert rows["sp"]["bytes"] == 2 * 4 * 2 * tokens * 8192 * 7 / 8 * layers * microbatches


def test_experts_over_nodes_have_one_network_card_a_gpu_and_a_dense_ep_splits_as_fsdp(capsys):
    run = ["--train.remat", "full", "--train.microbatches", "1", "--train.global-batch", "64"]
    found = answer(capsys, "deepseek_v3", "--gpus", "64", "--mesh", "ep=64", *run)
    assert [(row["nodes"], row["gbs"]) for row in found["axes"]] == [(8, 50.0)]
    (dense,) = answer(capsys, "llama3_8b", "--mesh", "ep=8", *run)["axes"]
    assert dense["splits"] == "batch, state by ZeRO-3"
    assert dense["bytes"] is None and dense["gbs"] == 450


def test_the_table_and_the_picture(capsys, tmp_path):
    path = tmp_path / "mesh.png"
    plan.main(["mesh", *BIG, "--figure", str(path)])
    shown = capsys.readouterr().out
    assert "0, 1, ..., 7" in shown and "0, 32" in shown and "over 2 nodes" in shown
    assert shown.endswith(f"wrote {path}\n") and path.read_bytes()[:4] == b"\x89PNG"
    plan.main(["mesh", "debug", "--gpus", "1", "--mesh", "fsdp=1"])
    assert capsys.readouterr().out.endswith("x1 none\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["debug", "--gpus", "1", "--figure", "a.png"], "gpus=1: the picture shows from 2 to"),
        (["debug", "--gpus", "8", "--figure", "a.svg"], "figure='a.svg': must end in .png"),
    ],
)
def test_a_picture_that_cannot_be_drawn_says_why(capsys, arguments, message):
    with pytest.raises(SystemExit):
        plan.main(["mesh", *arguments])
    assert message in capsys.readouterr().err
