"""The formulas' memory of fine-tuning is XLA's within 5%; tests/nightly has all of `tests/planned_memory.py`."""

from tests.gpu_programs import FAST, NO_MACHINE_CODE
from tests.planned_memory import check_memory


def test_memory_by_formula_is_that_of_the_program_of_a_teacher():
    check_memory("teacher", FAST | NO_MACHINE_CODE)
