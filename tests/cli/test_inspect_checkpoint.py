"""The checkpoints of a run as a user sees them, by the command that a user types."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from tests.faults.tiny import MODEL
from tests.states import some_state
from ultrascale_jax.checkpoint import manifest
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import with_digest
from ultrascale_jax.cli.inspect_checkpoint import main
from ultrascale_jax.config import Config, DataConfig, LogConfig, MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh

CFG = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=2),
    data=DataConfig(source="synthetic", seq_len=32),
)


@pytest.fixture
def run_dir(tmp_path):
    cfg = dataclasses.replace(CFG, log=LogConfig(run_dir=str(tmp_path)))
    state = some_state(cfg, make_mesh(cfg.mesh, jax.devices()[:2]))
    with Checkpoints(cfg) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, describe(cfg, step, "data"), wait=True)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    return tmp_path


def shown(capsys, *words, code=0):
    if code:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == code
    else:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    return (printed.out if code < 2 else printed.err).splitlines()


def largest(place):
    return max((path for path in place.rglob("d/*")), key=lambda path: path.stat().st_size)


@pytest.mark.slow
def test_every_checkpoint_has_a_line(run_dir, capsys):
    first, second = shown(capsys, run_dir)
    assert first.split()[0] == "1" and second.split()[0] == "2"
    assert f"jax {jax.__version__}" in first and "fsdp=2" in first and first.endswith("complete")


@pytest.mark.slow
def test_a_list_of_a_hundred_bytes_asks_for_no_device(run_dir):
    code = (
        "import sys; from ultrascale_jax.cli.inspect_checkpoint import main; main(sys.argv[1:]); "
    )
    code += "assert not {'jax', 'orbax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(run_dir)], check=True, timeout=60)


def test_verified_ones_are_called_so_and_a_damaged_one_by_its_file(run_dir, capsys):
    lines = shown(capsys, run_dir, "--verify")
    assert [line.split()[-1] for line in lines] == ["verified"] * 2
    path = largest(run_dir / "checkpoints/2")
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert shown(capsys, run_dir)[1].endswith("complete")
    lines = shown(capsys, run_dir, "--verify", code=1)
    assert lines[0].endswith("verified")
    assert "DAMAGED: " in lines[1] and path.name in lines[1]
    assert shown(capsys, run_dir, "--step", 2, code=1) == lines[1:]
    assert shown(capsys, run_dir, "--step", 1)[0].endswith("verified")


@pytest.mark.slow
def test_without_a_manifest_the_arrays_are_read(run_dir, capsys):
    place = run_dir / "checkpoints/2"
    (place / manifest.NAME).unlink()
    assert shown(capsys, run_dir)[1].endswith("no manifest")
    assert shown(capsys, run_dir, "--step", 2)[0].endswith("arrays verified, no manifest")
    meta = place / "_CHECKPOINT_METADATA"
    text = json.loads(meta.read_text())
    del text["custom_metadata"]["sha256"]
    text["custom_metadata"]["arrays"]["params/embed"][2] = "0" * 16
    text["custom_metadata"] = with_digest(text["custom_metadata"])
    meta.write_text(json.dumps(text))
    [line] = shown(capsys, run_dir, "--step", 2, code=1)
    assert "DAMAGED: array params/embed" in line


def test_arrays_are_listed_with_their_fingerprints(run_dir, capsys):
    lines = shown(capsys, run_dir, "--step", 1, "--arrays")
    [embed] = [line.split() for line in lines if "params/embed" in line]
    assert embed[:4] == ["params/embed", "float32", "(64,", "32)"] and len(embed[4]) == 16


def test_what_was_put_aside_is_told(run_dir, capsys):
    os.rename(run_dir / "checkpoints/2", run_dir / "checkpoints/2.corrupt")
    assert shown(capsys, run_dir)[1].split()[0] == "2.corrupt"
    os.rename(run_dir / "checkpoints/1", run_dir / "checkpoints/1.corrupt")
    assert "there is no complete checkpoint in " in shown(capsys, run_dir, code=1)[-1]


def test_a_checkpoint_that_says_nothing_is_damaged(run_dir, capsys):
    (run_dir / "checkpoints/2/_CHECKPOINT_METADATA").write_text("\x1b[31m{")
    lines = shown(capsys, run_dir, code=1)
    assert "DAMAGED: _CHECKPOINT_METADATA" in lines[1]


def test_arrays_that_no_reader_finds_are_damage_whatever_the_manifest_says(run_dir, capsys):
    place = run_dir / "checkpoints/2"
    (place / "params/manifest.ocdbt").unlink()
    manifest.write(place)
    lines = shown(capsys, run_dir, code=1)
    assert lines[0].endswith("complete")
    assert lines[1].endswith("DAMAGED: params/manifest.ocdbt is missing")


def test_a_run_at_a_path_that_orbax_cannot_read_is_refused(tmp_path, capsys):
    (tmp_path / "a\\b").mkdir()
    [line] = shown(capsys, tmp_path / "a\\b", code=2)
    assert line.startswith("error: run_dir=") and "without \\; rename the folder" in line


def test_what_is_no_run_or_step_is_refused(run_dir, tmp_path, capsys):
    assert "holds no config.json" in shown(capsys, tmp_path / "no", code=2)[0]
    assert "holds the steps [1, 2]" in shown(capsys, run_dir, "--step", 9, code=2)[0]
