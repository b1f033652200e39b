"""Command lines, recipes and the config that a run directory holds, by somebody who means no good.

Nothing of it is YAML. A recipe is a module of Python, which the user chooses to run: its name is checked, not its code.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile.bent import BOUNDED, anything, bent_text, harmless, numbers, texts
from ultrascale_jax.checkpoint.run_metadata import config_from_dict, fields
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import Config
from ultrascale_jax.configs.demo import config as demo
from ultrascale_jax.storage.foreign import read_json

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


@BOUNDED
@given(words=st.lists(WORDS, max_size=6))
@pytest.mark.slow
def test_any_command_line_is_read_or_refused_in_one_line(tmp_path, monkeypatch, words):
    """Row 21."""
    monkeypatch.chdir(tmp_path)
    with harmless(tmp_path):
        code, said = outcome(words)
    assert code in (None, 0, 2)
    if code == 2:
        assert said.startswith("error: ") and said.count("\n") == 1, said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@BOUNDED
@given(option=st.sampled_from(OPTIONS), value=st.one_of(texts, numbers.map(str)))
def test_any_value_of_any_field_is_taken_or_refused_in_one_line(option, value):
    """Row 21."""
    code, said = outcome(["demo", option, value])
    assert code in (None, 0, 2)
    if code == 2:
        assert said.startswith("error: ") and said.count("\n") == 1, said


@pytest.mark.parametrize(
    "words",
    [
        ["--log.run-dir", "a\0b"],
        ["--checkpoint.dir", "../../x"],
        ["--optim.betas", "0.9"],
        ["--optim.stochastic-rounding", "--optim.name", "muon"],
        ["--no.such-key", "1"],
        ["--model", "!!python/object/apply:os.system [true]"],
        ["--train.steps", "__import__('os').system('true')"],
        ["--train.steps", "1" * 5000],
        ["--mesh", "fsdp=" + "9" * 5000],
        ["--train.precision", "../../x"],
        ["--train.remat", "save:" + "q," * 100_000],
    ],
)
def test_what_no_field_can_mean_is_refused(tmp_path, monkeypatch, words):
    """Row 21."""
    monkeypatch.chdir(tmp_path)
    with harmless(tmp_path):
        code, said = outcome(["demo", *words])
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "../demo",
        "/etc/passwd",
        "configs/demo",
        "demo.py",
        "os.system",
        "..demo",
        "demo;import os",
        "a.b\0c",
        "configs.shapes",
        "no.such.module",
        "json",
        "x" * 10_000,
        ".".join("x" * 2000),
    ],
)
def test_a_recipe_that_is_none_is_refused_by_its_name(name):
    code, said = outcome([name])
    assert code == 2 and said.startswith("error: recipe=") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("config = 7", "must expose `config`"),
        ("raise RuntimeError('no')", r"RuntimeError: no"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("from ultrascale_jax.configs.demo import config\nimport no_such_module", "no_such_module"),
        (
            "from ultrascale_jax.config import *\nconfig = Config(train=TrainConfig(steps=-1))",
            "steps=-1",
        ),
    ],
)
def test_a_recipe_that_breaks_is_told_with_its_name(tmp_path, monkeypatch, source, said):
    """Row 21."""
    (tmp_path / "brokenpkg").mkdir()
    (tmp_path / "brokenpkg/recipe.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        code, words = outcome(["brokenpkg.recipe"])
    finally:
        for module in [name for name in sys.modules if name.startswith("brokenpkg")]:
            del sys.modules[module]
    assert code == 2 and words.startswith("error: ") and words.count("\n") == 1
    assert said in words


@BOUNDED
@given(data=st.data())
def test_a_saved_config_that_was_bent_is_refused_or_a_config(tmp_path, data):
    """Rows 21 and 22: what `ultrascale generate`, `ultrascale convert-hf` and a resumed run read."""
    (tmp_path / "config.json").write_bytes(data.draw(bent_text(dataclasses.asdict(demo))))
    with harmless(tmp_path):
        cfg = config_from_dict(read_json(tmp_path / "config.json"))
        assert isinstance(cfg, Config)
        with contextlib.suppress(ValueError):
            cfg.check(8)


@BOUNDED
@given(
    section=st.sampled_from([field.name for field in dataclasses.fields(Config)]), data=st.data()
)
def test_any_value_in_a_saved_section_is_refused_or_fits_its_field(tmp_path, section, data):
    values = json.loads(json.dumps(dataclasses.asdict(demo)))
    name = data.draw(st.sampled_from(sorted(values[section])))
    values[section][name] = data.draw(anything)
    with harmless(tmp_path):
        cfg = config_from_dict(values)
        assert type(getattr(getattr(cfg, section), name)) is not list
