"""The live page in a real browser: what it draws is what the run wrote, and text of a run never runs."""

import json
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser

import pytest

from tests.dashboard.test_server import dashboard, run_dir  # noqa: F401  fixtures

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"


class Page(HTMLParser):
    """The cells of the table of numbers of each chart, and the page's title."""

    def __init__(self, text):
        super().__init__()
        self.charts, self.title = {}, re.search("<title>(.*?)</title>", text)[1]
        self._field, self._row, self._cell = None, [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "figure":
            self._field = dict(attributes)["data-field"]
            self.charts[self._field] = []
        elif tag == "tr":
            self._row = []
        elif tag == "td":
            self._cell = ""

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag == "td":
            self._row.append(self._cell)
            self._cell = None
        elif tag == "tr" and self._field and self._row:
            self.charts[self._field].append([float(cell) for cell in self._row[1:]])
        elif tag == "figure":
            self._field = None


def shown(url):
    """The page after ten seconds of its own time."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,2000"]
    command += ["--virtual-time-budget=10000", "--dump-dom", f"{url}#numbers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Page(done.stdout)


def test_what_is_drawn_is_what_the_run_wrote_and_updates_arrive(dashboard, run_dir):  # noqa: F811
    def write_more():
        while not dashboard.runs[0].metrics.steps.length:
            time.sleep(0.01)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 301, "loss": 42.0, "time": 1e9 + 302}) + "\n")

    writer = threading.Thread(target=write_more)
    writer.start()
    page = shown(dashboard.url)
    writer.join()
    assert page.title == "Runs"
    assert page.charts["loss"] == [*([n, *[3.0 / n] * 3] for n in range(1, 301)), [301, 42, 42, 42]]
    assert page.charts["eval_loss"] == [[300, 0.5, 0.5, 0.5]]


def test_an_exported_page_draws_the_same_without_a_server(run_dir, tmp_path):  # noqa: F811
    from ultrascale_jax.cli import watch

    file = tmp_path / "runs.html"
    watch.main([str(run_dir), "--export", str(file)])
    page = shown(file.as_uri())
    assert page.title == "Runs"
    assert page.charts["loss"] == [[n, *[3.0 / n] * 3] for n in range(1, 301)]
