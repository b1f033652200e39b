"""The live page is told what its runs wrote, in words that people read."""

import json

import pytest

from tests.pages import HOSTILE, get, running, write_run
from ultrascale_jax.launch.events import Events
from ultrascale_jax.web import watch


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    write_run(folder)
    return folder


@pytest.fixture
def server(run_dir):
    with running(watch.live_server([run_dir], "127.0.0.1", 0)) as made:
        yield made


def test_state_and_series_are_those_of_the_run(server, run_dir):
    status, _, text = get(server, "/state?x=step&points=4000")
    (run,) = json.loads(text)["runs"]
    assert status == 200 and (run["summary"]["of"], run["summary"]["step"]) == (400, 300)
    assert [(event["kind"], event["step"]) for event in run["events"]] == [
        ("start", 300),
        ("failure", 200),
    ]
    assert run["goodput"] == 0 and [*run["series"]] == [
        "loss",
        "eval_loss",
        "eval_tokens",
    ]
    assert [(sample["step"], sample["text"]) for sample in run["samples"]] == [(300, HOSTILE)]
    series = run["series"]
    assert [[step, mean] for step, mean, *_ in series["loss"]] == [
        [n, 3.0 / n] for n in range(1, 301)
    ]
    assert series["eval_loss"] == [[300.0, 0.5, 0.5, 0.5]]
    near = json.loads(get(server, "/state?x=step&points=5&first=100&last=199")[2])["runs"][0]
    assert len(near["series"]["loss"]) == 5 and near["series"]["loss"][0][3] == 0.03


@pytest.mark.parametrize(
    "query", ["x=__dict__&points=9", "x=step&points=nine", "points=9", "x=step&points=9&first=a"]
)
def test_a_question_about_what_is_not_there_is_refused(server, query):
    assert get(server, f"/state?{query}")[0] == 400


DEVICES = [{"device": 3, "arrays": ["a.w", "b.w"]}]
SENTENCES = [
    ("start", {"restarts": 2}, "restarts 2"),
    (
        "failure",
        {"summary": "out of memory", "traceback": "x", "code": 1, "first": True},
        "out of memory, code 1, first yes",
    ),
    (
        "saved",
        {"bytes": 3 << 30, "write_s": 12.345, "hash_s": 0.5},
        "3.0 GiB, write 12.3 s, hash 0.5 s",
    ),
    (
        "replicas",
        {"certain": True, "devices": DEVICES},
        "certain yes, devices device 3 arrays a.w b.w",
    ),
    ("gave_up", {"ranks": [0, 1], "reason": "stopped"}, "ranks 0 1, stopped"),
    ("rerun", {"verdict": "persistent", "loss": [None, 2.5]}, "persistent, loss not finite 2.5"),
    ("skipped", {"reason": "spike", "loss": None, "grad_norm": 1234.56}, "spike, grad norm 1235"),
]


@pytest.mark.parametrize(("kind", "details", "text"), SENTENCES)
def test_an_event_is_a_sentence_and_no_python(kind, details, text, tmp_path):
    Events(tmp_path, 2).record(kind, **details)
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert watch.sentence(event | {"host": "node-1"}) == f"{text} (rank 2 on node-1)"


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        watch.main([str(tmp_path)])
    assert stop.value.code == 2
    assert "holds no metrics.jsonl or events.jsonl" in capsys.readouterr().err
