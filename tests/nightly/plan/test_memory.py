"""The formulas' memory of each layer and option of fine-tuning is XLA's within 5%."""

import pytest

from tests.planned_memory import PROGRAMS, check_memory


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_by_formula_is_that_of_the_program(name):
    check_memory(name)
