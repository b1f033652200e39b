"""The server of the live page answers who has its address, and nobody else; the exported page needs none."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from ultrascale_jax.cli import watch
from ultrascale_jax.dashboard.server import Dashboard
from ultrascale_jax.launch.events import Events

HOSTILE = (
    "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
)


@pytest.fixture
def run_dir(tmp_path):
    """A run of 300 steps with an event whose text is hostile."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": n, "loss": 3.0 / n, "time": 1e9 + n} for n in range(1, 301)]
    lines.append({"step": 300, "eval_loss": 0.5, "eval_tokens": 64, "time": 1e9 + 301})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 400}}))
    events = Events(folder, 0)
    events.record("start", began=1e9)
    events.record("failure", summary=HOSTILE, step=200)
    events.record("sample", step=300, prompt="def ", text=HOSTILE)
    return folder


@pytest.fixture
def dashboard(run_dir):
    with Dashboard([run_dir], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, host=None, token=None):
    """Status, headers and text of an answer."""
    token = server.token if token is None else token
    base = server.url.partition("?")[0]
    request = urllib.request.Request(f"{base}{path}{'&' if '?' in path else '?'}token={token}")
    if host is not None:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def test_state_and_series_are_those_of_the_run(dashboard, run_dir):
    status, _, text = get(dashboard, "state")
    (run,) = json.loads(text)["runs"]
    assert status == 200 and (run["rows"], run["total"], run["last"]["step"]) == (301, 400, 300)
    assert [(event["kind"], event["step"]) for event in run["events"]] == [
        ("start", 300),
        ("failure", 200),
    ]
    assert run["ledger"]["goodput"] == 0 and run["fields"] == ["loss", "eval_loss", "eval_tokens"]
    assert [(sample["step"], sample["text"]) for sample in run["samples"]] == [(300, HOSTILE)]
    series = json.loads(get(dashboard, "series?run=0&fields=loss,eval_loss&x=step&points=4000")[2])
    assert [[step, mean] for step, mean, *_ in series["loss"]] == [
        [n, 3.0 / n] for n in range(1, 301)
    ]
    assert series["eval_loss"] == [[300.0, 0.5, 0.5, 0.5]]
    near = json.loads(
        get(dashboard, "series?run=0&fields=loss&x=step&points=5&first=100&last=199")[2]
    )
    assert len(near["loss"]) == 5 and near["loss"][0][3] == 0.03


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("", {"token": ""}, 403),
        ("state", {"token": "guess"}, 403),
        ("state", {"host": "evil.example"}, 421),
        ("state", {"host": "localhost:1"}, 421),
        ("etc/passwd", {}, 404),
        ("series?run=0&fields=loss&x=__dict__&points=9", {}, 400),
        ("series?run=7&fields=loss&x=step&points=9", {}, 400),
        ("series?run=0&fields=loss&x=step&points=nine", {}, 400),
    ],
)
def test_who_has_not_the_address_gets_nothing(dashboard, path, options, status):
    found, _, text = get(dashboard, path, **options)
    assert found == status and "loss" not in text


def test_the_page_runs_its_own_script_alone(dashboard):
    status, headers, text = get(dashboard, "")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "frame-ancestors 'none'" in policy and "http" not in policy
    nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
    assert text.count(f'nonce="{nonce}"') == 2 == text.count(" nonce=")
    assert nonce not in get(dashboard, "")[2]


def test_an_exported_page_has_all_data_and_no_text_of_a_run_ends_its_script(
    run_dir, tmp_path, capsys
):
    file = tmp_path / "out/runs.html"
    watch.main([str(run_dir.parent), "--export", str(file)])
    assert capsys.readouterr().out == f"wrote {file}\n"
    text = file.read_text()
    assert text.count("</script>") == 1 and "https://" not in text and "http://" not in text
    inside = text.partition("const SETTINGS = ")[2].partition(";\n")[0]
    data = json.loads(inside)["data"]
    assert HOSTILE in data["runs"][0]["events"][1]["text"]
    assert len(data["series"][0]["step"]["loss"]) == 300


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        watch.main([str(tmp_path)])
    assert stop.value.code == 2
    assert "holds no metrics.jsonl or events.jsonl" in capsys.readouterr().err
