"""The soak judges a run by the faults that struck and of what the run says of them."""

import json

import pytest

from tests.faults import soak
from ultrascale_jax.cli import command_line, train
from ultrascale_jax.launch.goodput import Ledger

FLIP = soak.Strike(10.0, soak.FLIP, 45, "", flipped=40)


def event(time, kind, **details):
    return {"time": time, "kind": kind, **details}


def resumed(time, step):
    """A start, and the beginning of its steps."""
    return [event(time, "start", rank=0), event(time + 0.1, "begin", rank=0, step=step)]


def test_the_trainer_takes_the_words_of_a_soak(tmp_path):
    words = soak.arguments(soak.Options(), tmp_path, "demo")
    cfg, _ = command_line.parse(words, prog="", options=train.Options)
    assert (cfg.checkpoint.every, cfg.watch.rerun) == (20, True)


def metrics(*steps, loss=2.0):
    return [
        {"step": step, "loss": loss, "grad_norm": 1.0, "batch_hash": f"h{step}", "time": 5.0 * step}
        for step in steps
    ]


GOOD = {
    "rows": metrics(1, 2, 3, 4),
    "quiet": metrics(1, 2, 3, 4),
    "explained_s": 95.0,
    "strikes": [FLIP, soak.Strike(23.0, soak.FULL, 3, "")],
    "events": [
        *(event(11.0, "quarantined", step=40), *resumed(12.0, 20), event(20.0, "save_failed")),
        event(99.0, "gave_up", reason="told to stop"),
    ],
}
"""A run in which a flipped checkpoint was found, and a save (of step 4, at 20 s) failed on a full disk."""


def verdict(tmp_path, **changed):
    """The answers of the verdict's lines with their first words, and whether all is good."""
    record = GOOD | changed
    for name, rows in (("rows", record["rows"]), ("quiet", record["quiet"])):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    events = "".join(json.dumps(row) + "\n" for row in record["events"])
    (tmp_path / "rows/events.jsonl").write_text(events)
    options = soak.Options(save_every=4)
    ledger = Ledger()
    ledger.seconds["productive"] = record["explained_s"]
    folders = tmp_path / "rows", tmp_path / "quiet"
    report, good = soak.verdict(options, 100.0, record["strikes"], ledger, *folders)
    part = report.partition("## Verdict\n\n")[2].partition("\n\n")[0]
    lines = [line for line in part.splitlines() if line.startswith(("- Yes: ", "- **NO**: "))]
    return {line.partition(": ")[2]: line.startswith("- Yes") for line in lines}, good


def without(kind):
    return [row for row in GOOD["events"] if row["kind"] != kind]


BAD = {
    "Every step from 1 to 4 ": [
        {"rows": metrics(1, 2, 4)},
        {"rows": metrics(1, 2, 3, 3, 4)},
        {"rows": []},
    ],
    "Loss, gradient norm and batch ": [
        {"quiet": metrics(1, 2, 3)},
        {"quiet": metrics(1, 2, 3) + metrics(4, loss=2.0000001)},
        {"quiet": [row | {"batch_hash": "h"} for row in GOOD["quiet"]]},
    ],
    "The ledger's classes ": [{"explained_s": 80.0}, {"explained_s": 101.0}],
    "No supervisor gave up ": [
        {"events": [*GOOD["events"], event(50.0, "gave_up", reason="no step beyond 3")]}
    ],
    "Every flipped checkpoint ": [{"events": without("quarantined")}],
    "No checkpoint that was sound ": [
        {"events": [*GOOD["events"], event(30.0, "quarantined", step=2)]}
    ],
    "Of 1 saves ": [{"events": without("save_failed")}],
}
"""Of each line of the verdict, records that turn it to NO."""


def test_the_verdict_on_a_good_record_is_yes_in_every_line(tmp_path):
    answers, good = verdict(tmp_path)
    assert good and all(answers.values())
    assert all(sum(line.startswith(words) for line in answers) == 1 for words in BAD)
    assert len(answers) == len(BAD)


@pytest.mark.parametrize("words", BAD)
def test_each_line_of_the_verdict_turns_to_no(tmp_path, words):
    for number, changed in enumerate(BAD[words]):
        (tmp_path / str(number)).mkdir()
        answers, good = verdict(tmp_path / str(number), **changed)
        words = words if changed.get("rows") != [] else "Every step from 1 to 0 "
        assert not good
        assert [yes for line, yes in answers.items() if line.startswith(words)] == [False], words
