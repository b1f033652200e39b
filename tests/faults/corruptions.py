"""Damage a copy of a run directory at random, resume it, and compare the end with that of the run left alone.

`python -m tests.faults.corruptions FOLDER FIRST LAST` does so for the seeds FIRST to LAST - 1, and prints a line of
JSON for each. A resume that takes longer than `LIMIT_S` ends the process with the stacks of its threads.
"""

import contextlib
import dataclasses
import faulthandler
import io
import json
import random
import shutil
import sys
from pathlib import Path

from tests.checkpoints import flip
from tests.faults.tiny import config as TINY
from tests.processes import python
from tests.runs import bits, change, run, saved_state, step_rows
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.config import CheckpointConfig, Config, UserError

LIMIT_S = 100
SAVED, END = 6, 8
"""Last step of the run that is damaged, and of its resume."""

CFG = change(
    dataclasses.replace(TINY, checkpoint=CheckpointConfig(every=2, keep=5)),
    mesh={"fsdp": 2},
    optim={"schedule": "constant"},
)


def until(step: int) -> Config:
    return change(CFG, train={"steps": step})


def damage(folder: Path, rng: random.Random) -> list[str]:
    """Damage one to three files, mostly of checkpoints and mostly of the newest; return what was done."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    newest = [path for path in paths if f"checkpoints/{SAVED}/" in str(path)]
    saved = [path for path in paths if "/checkpoints/" in str(path)]
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        path = rng.choice(rng.choice([newest, newest, saved, paths]))
        kind = rng.choice(["flip", "truncate", "delete", "empty", "swap"])
        done.append(f"{kind} {path.relative_to(folder)}")
        if not path.exists():
            continue
        content = path.read_bytes()
        if kind == "flip" and content:
            flip(path, rng.randrange(len(content)), rng.randrange(8))
        elif kind == "truncate":
            path.write_bytes(content[: rng.randrange(max(1, len(content)))])
        elif kind == "delete":
            path.unlink()
        elif kind == "empty":
            path.write_bytes(b"")
        elif kind == "swap":
            other = rng.choice([one for one in rng.choice([newest, saved]) if one.exists()])
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
    return done


def losses(folder: Path, first: int) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in step_rows(folder) if row["step"] > first}


def attempt(whole: Path, expected: list[bytes], seed: int) -> dict:
    """Return the outcome of one resume: `restored` with the step, or `refused`, or what is wrong."""
    rng, folder = random.Random(seed), whole.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole.with_name("part"), folder)
    outcome: dict = {"seed": seed, "done": damage(folder, rng)}
    out = io.StringIO()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with contextlib.redirect_stdout(out):
            run(until(END), folder)
    except UserError as error:
        return outcome | {"outcome": "refused", "why": str(error)}
    finally:
        faulthandler.cancel_dump_traceback_later()
    said = out.getvalue()
    [line] = [line for line in said.splitlines() if "resumed from " in line] or [""]
    first = int(line.rsplit("/", 1)[-1]) if line else 0
    skipped = [line for line in said.splitlines() if "SKIPPED CHECKPOINT" in line]
    aside = [path for path in (folder / "checkpoints").iterdir() if ".corrupt" in path.name]
    outcome |= {"outcome": "restored", "step": first, "skipped": skipped}
    newer = {2, 4, SAVED} - set(range(first + 1))
    missing = (
        newer - set(steps(folder / "checkpoints")) - {int(p.name.split(".")[0]) for p in aside}
    )
    if bits(saved_state(until(END), folder, END)) != expected:
        outcome["outcome"] = "another state"
    elif losses(folder, first) != losses(whole, first):
        outcome["outcome"] = "other losses"
    elif len(skipped) != len(newer) or missing:
        outcome["outcome"] = "in silence"
    return outcome


def check_outcomes(folder: Path, seeds: range) -> None:
    """Check the outcome of each of `seeds`, in a process of its own: TensorStore goes on reading after a failure."""
    words = ("-m", "tests.faults.corruptions", folder, seeds.start, seeds.stop)
    # All of these runs have the same programs.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with python(*words, devices=2, env=cache) as run:
        out, error = run.communicate(timeout=1800)
    assert run.returncode == 0, out[-2000:] + error[-4000:]
    outcomes = [json.loads(line) for line in out.splitlines() if line.startswith('{"seed"')]
    assert [one["seed"] for one in outcomes] == list(seeds)
    wrong = [one for one in outcomes if one["outcome"] not in ("restored", "refused")]
    assert not wrong, wrong
    for one in outcomes:
        if one["outcome"] == "refused":
            assert "Traceback" not in one["why"] and 10 < len(one["why"]) < 1000, one
    assert any(one["outcome"] == "restored" and one["step"] < SAVED for one in outcomes)


def main(folder: Path, first: int, last: int) -> None:
    whole, part = folder / "whole", folder / "part"
    run(until(END), whole)
    run(until(SAVED), part)
    expected = bits(saved_state(until(END), whole, END))
    for seed in range(first, last):
        print(json.dumps(attempt(whole, expected, seed)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
