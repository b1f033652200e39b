"""Checkpoints on disk: what is one, what it says, and how it is put aside."""

import json

import pytest

from ultrascale_jax.checkpoint.step_dirs import (
    METADATA,
    metadata,
    quarantine,
    quarantined,
    steps,
    with_digest,
)
from ultrascale_jax.launch.failures import Damaged

META = {"config": {}, "data": {"step": 5, "fingerprint": "x"}, "versions": {}, "arrays": {}}


def signed(**changes) -> str:
    """Return a file of metadata with its digest."""
    return json.dumps({"custom_metadata": with_digest(META | changes)})


def test_steps_are_folders_with_plain_numbers(tmp_path):
    for name in ("10", "9", "007", "8.orbax-checkpoint-tmp", "7.corrupt", "step_6", "\u0665", "."):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "4").write_text("a file")
    assert steps(tmp_path) == [9, 10]
    assert steps(tmp_path / "absent") == []
    assert quarantined(tmp_path) == ["7.corrupt"]


def test_one_that_is_put_aside_replaces_none(tmp_path):
    names = []
    for _ in range(3):
        (tmp_path / "5").mkdir()
        names.append(quarantine(tmp_path / "5").name)
    assert names == ["5.corrupt", "5.corrupt.2", "5.corrupt.3"] == quarantined(tmp_path)
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (json.dumps({"custom_metadata": META}), "cannot be read .*sha256"),
        (json.dumps({"custom_metadata": META | {"sha256": "0"}}), "not as it was saved"),
        (signed(config=3), "not of this program"),
        (signed(data={"step": 5}), "not of this program"),
        (signed(data={"step": 6, "fingerprint": ""}), "step 6"),
    ],
)
def test_metadata_of_another_form_is_damage(tmp_path, text, words):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / METADATA).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Damaged, match=words):
        metadata(tmp_path / "5")


def test_a_flipped_bit_of_metadata_is_damage(tmp_path):
    (tmp_path / "5").mkdir()
    with pytest.raises(Damaged, match="is missing"):
        metadata(tmp_path / "5")
    content = signed().encode()
    (tmp_path / "5" / METADATA).write_bytes(content)
    assert metadata(tmp_path / "5") == META
    for n in range(len(content)):
        flipped = bytearray(content)
        flipped[n] ^= 1 << n % 8
        (tmp_path / "5" / METADATA).write_bytes(flipped)
        with pytest.raises(Damaged):
            metadata(tmp_path / "5")
