"""Commands and modules start without the packages that they do not need, and importing the library changes nothing."""

import subprocess
import sys

from tests.paths import ROOT


def python(*words: str) -> str:
    """Return what a fresh Python prints."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_configuration_loads_no_third_party_package():
    code = "import sys, ultrascale_jax.config; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(python("-S", "-c", code).split())
    assert loaded - {"ultrascale_jax", "__main__"} <= sys.stdlib_module_names


def test_help_and_data_need_no_jax_and_a_plan_by_formula_no_numpy():
    code = """
import sys
from ultrascale_jax.cli.main import COMMANDS, module_of
module_of("plan").main(["memory", "debug", "--gpus", "8"])
assert not {"jax", "numpy", "matplotlib"} & sys.modules.keys()
for command in COMMANDS:
    try: module_of(command).main(["--help"])
    except SystemExit: pass
import ultrascale_jax.data.sources
assert "jax" not in sys.modules
"""
    python("-c", code)


def test_importing_every_public_name_leaves_the_process_as_it_was():
    python(
        "-c",
        """
import jax, logging, os, sys
before = dict(os.environ)
from ultrascale_jax import *
assert dict(os.environ) == before, set(os.environ) ^ set(before)
assert not logging.root.handlers
heavy = [m for m in sys.modules if m.startswith(("grain", "orbax", "jax.experimental.mosaic"))]
assert not heavy, heavy[:5]
""",
    )
