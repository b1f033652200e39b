"""Commands and modules start without the packages that they do not need, and importing the library changes nothing."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    "code",
    [
        "import ultrascale_jax.data.sources, ultrascale_jax.cli.main",
        """
from ultrascale_jax.cli.main import COMMANDS, module_of
for command in COMMANDS:
    try: module_of(command).main(["--help"])
    except SystemExit: pass
""",
    ],
)
def test_help_and_what_prepares_data_need_no_jax(code):
    assert python("-c", f"import sys\n{code}\nprint('jax' in sys.modules)").endswith("False\n")


def test_help_names_the_recipes_and_every_section():
    text = python("-m", "ultrascale_jax", "train", "--help")
    for words in ("llama3_8b", "--mesh AXIS=SIZE", "--train.global-batch INT", "Peak learning"):
        assert words in text


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
