"""The recipe FAULTY_RECIPE, in whose runs the faults of FAULTS strike (`inject.py`)."""

import os

from tests.faults import inject
from ultrascale_jax.cli.command_line import load_recipe

config = load_recipe(os.environ["FAULTY_RECIPE"])
inject.install(os.environ)
