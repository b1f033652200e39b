"""Verbs of `plan` give one answer to one question."""

from tests.plan_questions import check, questions


def test_guide_search_and_memory_agree(capsys):
    verdicts = {check(capsys, *asked) for asked in questions(4)}
    assert {"fits", "does not fit"} <= verdicts
