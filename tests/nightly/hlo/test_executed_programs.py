"""Every case of `scripts/executed_programs.py`: its H100 program computes the step of the CPU."""

import pytest

from scripts import executed_programs


@pytest.mark.parametrize("case", executed_programs.CASES)
def test_every_h100_program_computes_the_cpus_step(case):
    row = executed_programs.run_case(case)
    assert row.right, row
