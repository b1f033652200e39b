"""Every block of the course prints what its page says, and every exercise is red until it is solved; `make test` runs a
tenth of the commands, and one exercise."""

import pytest

from scripts import course
from tests import exercises
from tests.mutants import check_sound, copy_tree, try_mutant


@pytest.mark.parametrize("page", course.find_pages(), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_print_what_it_says(page):
    course.check(page)


def test_every_exercise_is_red_as_its_page_says_until_it_has_the_trainers_text(tmp_path):
    every, tree, cache = exercises.exercises().values(), tmp_path / "tree", tmp_path / "cache"
    copy_tree(tree)
    check_sound(list(every), tree, cache)
    for exercise in every:
        result = try_mutant(exercise, tree, cache)
        assert (result.verdict, exercise.sees in result.output) == ("caught", True), result.output
