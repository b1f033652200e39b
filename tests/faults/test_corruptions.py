"""A run directory that was damaged at random: a resume restores a sound step bit for bit, or ends with one line."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def outcomes(folder, first, last):
    """Return the outcomes of these seeds, in a process of its own: TensorStore goes on reading after a failure."""
    words = [sys.executable, "-m", "tests.faults.corruptions", str(folder), str(first), str(last)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "2",
        # All of these runs have the same programs.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seed"')]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(150), marks=[pytest.mark.wide, pytest.mark.faults])]
)
def test_damage_is_skipped_loudly_or_refused_in_a_line(tmp_path, seeds):
    found = outcomes(tmp_path, seeds.start, seeds.stop)
    assert [one["seed"] for one in found] == list(seeds)
    wrong = [one for one in found if one["outcome"] not in ("restored", "refused")]
    assert not wrong, wrong
    for one in found:
        if one["outcome"] == "refused":
            assert "Traceback" not in one["why"] and 10 < len(one["why"]) < 1000, one
    print(collections.Counter((one["outcome"], one.get("step")) for one in found))
    assert any(one["outcome"] == "restored" and one["step"] < 6 for one in found)
