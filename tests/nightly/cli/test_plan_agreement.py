"""Verbs of `plan` give one answer to one question: more questions than every change asks."""

import pytest

from tests.plan_questions import check, larger_questions, questions


@pytest.mark.parametrize(("machine", "run"), questions(50)[4:] + larger_questions(50))
def test_guide_search_and_memory_agree(machine, run, capsys):
    check(capsys, machine, run)
