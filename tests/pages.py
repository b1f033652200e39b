"""Helpers for tests of the pages: a running server, requests to it, and a run to watch."""

import contextlib
import http.client
import json
import threading
from pathlib import Path

from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.launch.events import Events
from ultrascale_jax.web import serve
from ultrascale_jax.web.fields import Bases

HOSTILE = (
    "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
)


@contextlib.contextmanager
def running(server):
    """Answer requests in another thread."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()


def request(server, path, **headers):
    """Status, headers and text of an answer; nothing follows a redirection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def get(server, path, **headers):
    """Return the answer to a browser that has opened the address of the server."""
    return request(server, path, Cookie=f"ultrascale_{server.port}={server.token}", **headers)


def write_run(folder: Path) -> None:
    """Write a run of 300 steps with an event whose text is hostile."""
    folder.mkdir()
    lines = [{"step": n, "loss": 3.0 / n, "time": 1e9 + n} for n in range(1, 301)]
    lines.append({"step": 300, "eval_loss": 0.5, "eval_tokens": 64, "time": 1e9 + 301})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 400}}))
    events = Events(folder, 0)
    events.record("start", began=1e9)
    events.record("failure", summary=HOSTILE, step=200)
    events.record("sample", step=300, prompt="def ", text=HOSTILE)


def bases_of(*argv: str) -> Bases:
    """Configuration and machine with which the command line `plan serve argv` begins."""
    cfg, options, _ = common.parse(list(argv), "serve", serve.Options, "")
    return Bases(cfg=cfg, options=options)
