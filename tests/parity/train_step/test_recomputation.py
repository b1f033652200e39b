"""Tensors that wait in the host's memory change no number; the rows of parity have the policies without a host."""

import pytest

from tests.parity.comparison import compare
from tests.parity.rows import BASE
from tests.runs import change
from ultrascale_jax.config import Keep

REMAT = Keep(saved=("q",), offloaded=("layer_input", "gate"))


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "sp": 2, "tp": 2}, {"fsdp": 1}], ids=str)
def test_offloaded_tensors_change_no_number(mesh):
    """The first mesh gathers ahead, whose loop copies them; on one device JAX's checkpoint does."""
    compare(change(BASE, mesh=mesh, train={"remat": REMAT}))
