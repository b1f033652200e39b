"""Random models on random meshes, by the command line: equal to one device, or refused before the first step."""

import os
import random

import pytest

from tests.random_models import try_seed, undrawn

COUNT = 24
FIRST = int(os.environ.get("RANDOM_MODELS_SEED", random.SystemRandom().randrange(10**6)))
"""The first seed; a test that fails says its own, with which `-k 'refused[0]'` repeats it."""


def test_every_field_of_a_model_is_drawn():
    assert not undrawn()


# Each worker of pytest-xdist draws a first seed, and all must collect the same names.
@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_model_is_equal_on_its_mesh_or_refused(number, tmp_path):
    outcome = try_seed(FIRST + number, tmp_path)
    print(f"seed {outcome.seed}: {outcome.result}")
    assert not outcome.fault, f"seed {outcome.seed}: {outcome.fault}: {outcome.words}"
