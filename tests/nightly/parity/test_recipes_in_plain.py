"""The recipes that `tests/parity` leaves out, cut small, train alike with and without the rules of lowering."""

import pytest

from tests.small_recipes import BY_DAY, RUNS, compare_with_plain


@pytest.mark.parametrize("names", sorted(set(RUNS) - set(BY_DAY)))
def test_no_rule_of_lowering_changes_losses_or_gradients(names, tmp_path):
    compare_with_plain(names, tmp_path)
