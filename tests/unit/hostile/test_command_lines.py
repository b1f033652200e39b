"""Command lines and recipes by somebody who means no good (row 21 of the matrix of faults in docs/reliability.md).

Nothing of it is YAML. A recipe is a module of Python, which the user chooses to run: its name is checked, not its code.
"""

import contextlib
import importlib
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bent import BOUNDED, harmless, numbers, texts
from ultrascale_jax.checkpoint.run_metadata import fields
from ultrascale_jax.cli import command_line
from ultrascale_jax.configs.demo import config as demo

OPTIONS = sorted(f"--{name.replace('_', '-')}" for name in fields(demo))
WORDS = st.one_of(
    st.sampled_from(
        [*OPTIONS, "--mesh", "--log.run-dir", "--fake-devices", "--print-config", "--help", "demo"]
    ),
    texts.filter(lambda text: "\0" not in text),
    numbers.map(str),
)


def outcome(words):
    """Parse `words` as a script does, and return nothing, or the exit code and the lines of the error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line.parse(words, prog="test")
        except SystemExit as stop:
            return stop.code, err.getvalue()
    return None, err.getvalue()


def is_one_error(code, said):
    return code == 2 and said.startswith("error: ") and said.count("\n") == 1


@BOUNDED
@given(words=st.lists(WORDS, max_size=6))
def test_any_command_line_is_read_or_refused_in_one_line(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with harmless(tmp_path):
        code, said = outcome(words)
    assert code in (None, 0) or is_one_error(code, said), said
    assert list(tmp_path.iterdir()) == []


@BOUNDED
@given(option=st.sampled_from(OPTIONS), value=st.one_of(texts, numbers.map(str)))
def test_any_value_of_any_field_is_taken_or_refused_in_one_line(option, value):
    code, said = outcome(["demo", option, value])
    assert code in (None, 0) or is_one_error(code, said), said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("config = 7", "must expose `config`"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import no_such_module", "no_such_module"),
        ("from ultrascale_jax import TrainConfig; TrainConfig(steps=-1)", "steps=-1"),
    ],
)
def test_a_recipe_that_breaks_is_told_with_its_name(tmp_path, monkeypatch, source, said):
    (tmp_path / "brokenpkg").mkdir()
    (tmp_path / "brokenpkg/recipe.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        code, words = outcome(["brokenpkg.recipe"])
    finally:
        for module in [name for name in sys.modules if name.startswith("brokenpkg")]:
            del sys.modules[module]
    assert is_one_error(code, words) and said in words
