"""The formulas' memory of fine-tuning is XLA's within 5%; tests/nightly has all of `tests/planned_memory.py`."""

import pytest

from tests.planned_memory import check_memory


@pytest.mark.parametrize("name", ["lora-on-fp8", "teacher", "folded-experts"])
def test_memory_by_formula_is_that_of_the_program(name):
    check_memory(name)
