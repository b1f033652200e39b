"""Tensors that wait in the host's memory, and policies that differ between layers, change no number; the rows of parity
have the policies of all layers without a host."""

import pytest

from tests.parity.comparison import compare
from tests.parity.rows import BALANCED, BASE, MODELS
from tests.runs import change
from ultrascale_jax.config import Keep, Split

REMAT = Keep(saved=("q",), offloaded=("layer_input", "gate"))


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "sp": 2, "tp": 2}, {"fsdp": 1}], ids=str)
def test_offloaded_tensors_change_no_number(mesh):
    """The first mesh gathers ahead, whose loop copies them; on one device JAX's checkpoint does."""
    compare(change(BASE, mesh=mesh, train={"remat": REMAT}))


@pytest.mark.parametrize(
    ("model", "mesh", "remat"),
    [
        ("llama", {"fsdp": 2, "sp": 2}, Split(first="full", layers=2, others="selective")),
        ("sinks", {"fsdp": 2}, Split(first=REMAT, layers=4, others="dots")),
        ("gpt_oss", {"fsdp": 1, "ep": 2}, Split(first="full", layers=3, others="none")),
        ("llama", {"fsdp": 1, "pp": 2}, Split(first="full", layers=1, others="selective")),
    ],
    ids=str,
)
def test_policies_by_layer_change_no_number(model, mesh, remat):
    """Two meshes gather ahead. The split of experts is within their layers; a stage of the pipeline has three layers,
    and splits its backward passes."""
    changes = {"moe": BALANCED if "experts" in MODELS[model] else {}}
    changes |= {
        "pp": {"schedule": "zb_uniform"},
        "train": {"remat": remat, "zero": 3 if mesh["fsdp"] > 1 else 1},
    }
    compare(change(BASE, model=MODELS[model], mesh=mesh, **changes))
