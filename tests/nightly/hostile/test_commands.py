"""Commands refuse a run whose config was bent in one line (rows 21 and 22 of docs/reliability.md), to their end."""

import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bent import BOUNDED, bent_text, harmless
from tests.faults.tiny import config as TINY
from tests.runs import change, run
from ultrascale_jax.cli import convert_hf, generate


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run(change(TINY, train={"steps": 2}, mesh={"fsdp": 1}), folder)
    return folder


@settings(BOUNDED, max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "25")))
@given(data=st.data(), script=st.sampled_from(["generate", "export"]))
def test_scripts_refuse_a_run_whose_config_was_bent_in_one_line(
    run_dir, tmp_path, capsys, data, script
):
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    shutil.copytree(run_dir, folder)
    config = json.loads((run_dir / "config.json").read_text())
    (folder / "config.json").write_bytes(data.draw(bent_text(config)))
    capsys.readouterr()
    code = None
    try:
        with harmless(tmp_path):
            if script == "generate":
                generate.main([str(folder), "--prompt", "a", "--num-tokens", "1"])
            else:
                convert_hf.main([str(folder), str(tmp_path / "out")])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code in (None, 2)
    assert code is None or (said.startswith("error: ") and said.count("\n") == 1), said
