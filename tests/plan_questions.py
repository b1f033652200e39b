"""Random questions to verbs of `plan`, by a fixed seed, to which all give one answer."""

import contextlib
import json
import random
import re
import shlex
from collections.abc import Sequence

import pytest

from ultrascale_jax.cli import plan

SIZES = ("peak_bytes", "host_bytes", "verdict", "label")


type Question = tuple[list[str], list[str]]
"""Words of the command line for the machine, and those for the run."""


SMALL = ("smollm2_135m", "llama32_1b")
LARGE = ("llama3_8b", "qwen3_8b", "qwen3_30b_a3b")


def questions(count: int, models: Sequence[str] = SMALL) -> list[Question]:
    """Return questions about these models on a few GPUs, the same each time."""
    draw, asked = random.Random(43), []
    for _ in range(count):
        gpus = draw.choice([2, 4])
        machine = ["--gpus", str(gpus)]
        machine += draw.choice(
            [
                ["--gpu", "h100"],
                ["--gpu", "l4"],
                ["--gpu", "3,600,100", "--cluster", f"1x{gpus},64,12"],
            ]
        )
        run = [draw.choice(models)]
        run += ["--train.global-batch", str(draw.choice([2, 4]))]
        run += ["--data.seq-len", str(draw.choice([1024, 4096, 16384]))]
        run += draw.choice([[], ["--train.zero", "3"], ["--train.remat", "full"], ["--mesh.pp=2"]])
        asked.append((machine, run))
    return asked


def answer(capsys, *words: str) -> dict:
    """Ask a verb; exit code 1 is an answer too."""
    with contextlib.suppress(SystemExit):
        plan.main([*words, "--json"])
    captured = capsys.readouterr()
    told = json.loads(captured.out) if captured.out else {"error": captured.err}
    return told | {"chosen": captured.err}


def check(capsys, machine: list[str], run: list[str]) -> str:
    """Compare the verbs, and return the verdict."""
    words = [*run, *machine]
    search = answer(capsys, "search", *words, "--compile", "0", "--top", "1")
    guide = answer(capsys, "guide", *words)
    is_free = "--mesh.pp=2" not in words  # `--mesh auto` chooses every axis
    auto = answer(capsys, "memory", *words, "--mesh", "auto") if is_free else None
    if "error" in search:
        assert guide["error"] == search["error"]
        return "illegal"
    assert guide["command"] == search["command"]
    assert guide["answer"] == search["answer"]
    if search["command"] is None:
        assert guide["bill"] is None
        assert auto is None or auto["verdict"] == "does not fit"
        return "does not fit"
    best = search["rows"][0]
    if auto is not None:
        assert auto["verdict"] == best["verdict"]
        assert auto["step_s"] == pytest.approx(best["step_s"], rel=0.02)
        faster = r"; faster but unsure, (\d+%) of the memory by formula: (.*), (\S+) s a step; "
        assert re.findall(faster, auto["chosen"]) == re.findall(faster, search["answer"])
    own = answer(capsys, "memory", *shlex.split(search["command"])[2:], *machine)
    for name in SIZES:
        assert own[name] == best[name] == guide["step"][name], name
    assert own["step_s"] == best["step_s"] == guide["step"]["step_s"]
    rows = [row for row in guide["throughput"] if row["why"].startswith("best")]
    assert [row["label"] for row in rows] == [best["label"]]
    return best["verdict"]
