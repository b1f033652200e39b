"""The bytes of every axis, as `tests/programs/plan/test_placement.py` compares them, on twelve more meshes."""

import pytest

from tests.programs.plan.test_placement import EXPERTS, check_sent_bytes

ACCUMULATED = {"global_batch": 32, "microbatches": 2}
LONG = {"global_batch": 4, "seq_len": 4096}

MESHES = {
    "dp-zero0": ({"dp": 8}, ACCUMULATED | {"zero": 0}),
    "fsdp-zero1": ({"fsdp": 8}, ACCUMULATED | {"zero": 1, "remat": "none"}),
    "fsdp-zero2": ({"fsdp": 8}, ACCUMULATED | {"zero": 2}),
    "fsdp-zero3": ({"fsdp": 8}, {}),
    "dp-fsdp": ({"dp": 2, "fsdp": 4}, ACCUMULATED),
    "fsdp-tp": ({"fsdp": 2, "tp": 4}, {"remat": "none"}),
    "fsdp-zigzag": ({"fsdp": 2, "cp": 4}, LONG),
    "fsdp-ulysses": ({"fsdp": 2, "cp": 4}, LONG | {"cp": {"strategy": "ulysses"}, "remat": "dots"}),
    "fsdp-ep": ({"fsdp": 2, "ep": 4}, {"experts": EXPERTS, "remat": "dots"}),
    "ep-sp": ({"ep": 4, "sp": 2}, {"experts": EXPERTS, "remat": "none"}),
    "pp-fsdp": ({"pp": 4, "fsdp": 2}, {"microbatches": 32, "global_batch": 64, "zero": 1}),
    "pp-fsdp-tp-ep": (
        {"pp": 2, "fsdp": 2, "tp": 2, "ep": 2},
        {"experts": EXPERTS, "microbatches": 8, "global_batch": 64, "zero": 1},
    ),
}


@pytest.mark.parametrize(("mesh", "run"), MESHES.values(), ids=MESHES)
def test_mesh(mesh, run):
    check_sent_bytes(mesh, **run)
