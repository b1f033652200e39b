"""The live page in a real browser: what it draws is what the run wrote, and text of a run never runs."""

import json

import pytest

from tests.chromium import Chromium, needs_chromium
from tests.pages import running, write_run
from ultrascale_jax.web import watch

pytestmark = needs_chromium


@pytest.fixture
def run_dir(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def server(run_dir):
    with running(watch.live_server([run_dir], "127.0.0.1", 0)) as made:
        yield made


NUMBERS = """[...document.querySelectorAll("figure[data-field={}] tbody tr")].map(
    (row) => [...row.cells].slice(1).map((cell) => Number(cell.textContent)))"""


def test_what_is_drawn_is_what_the_run_wrote_and_updates_arrive(server, run_dir):
    first = [[n, *[3.0 / n] * 3] for n in range(1, 301)]
    with Chromium(f"{server.url}#numbers", 1400, 2000) as browser:
        browser.wait_for(f"{NUMBERS.format('loss')}.length === 300")
        assert browser.run(NUMBERS.format("loss")) == first
        assert browser.run(NUMBERS.format("eval_loss")) == [[300, 0.5, 0.5, 0.5]]
        line = browser.run(
            'document.querySelector("figure[data-field=loss] polyline").getAttribute("points")'
        )
        assert len(line.split()) == 300
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 301, "loss": 42.0, "time": 1e9 + 302}) + "\n")
        browser.wait_for(f"{NUMBERS.format('loss')}.length === 301")
        assert browser.run(NUMBERS.format("loss")) == [*first, [301, 42, 42, 42]]
        # The address has no token, and no script can read the cookie.
        assert "token" not in browser.run("location.href") + browser.run("document.cookie")
        assert browser.run("document.title") == "Runs" and browser.errors == []


def test_the_table_of_runs_has_the_columns_that_a_run_fills(server, run_dir):
    heads = '[...document.querySelectorAll("#runs th")].map((cell) => cell.textContent)'
    with Chromium(server.url, 1000, 900) as browser:
        browser.wait_for('document.querySelectorAll("#events tbody tr").length === 2')
        assert "loss" in browser.run(heads) and "MFU" not in browser.run(heads)
        said = browser.run('document.getElementById("events").innerText')
        assert "failure" in said and "<img src=x" in said and "(rank 0 on " in said
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 301, "loss": 42.0, "mfu": 0.5, "time": 1e9 + 302}) + "\n"
            )
        browser.wait_for(f"{heads}.includes('MFU')")
        assert "50.0%" in browser.run('document.getElementById("runs").innerText')


def test_a_drag_zooms_all_charts(server):
    with Chromium(server.url, 1000, 900) as browser:
        svg = 'document.querySelector("figure[data-field=loss] svg")'
        browser.wait_for(f"Boolean({svg}?.querySelector('polyline'))")
        for kind, share in (("pointerdown", 0.5), ("pointermove", 0.7), ("pointerup", 0.7)):
            browser.run(
                f"(() => {{ const box = {svg}.getBoundingClientRect(); {svg}.setPointerCapture = () => {{}};"
                f" {svg}.dispatchEvent(new PointerEvent('{kind}', "
                f"{{ clientX: box.left + {share} * box.width, pointerId: 1 }})); }})()"
            )
        fewer = f"{svg}.querySelector('polyline').getAttribute('points').split(' ').length"
        assert 30 < browser.wait_for(f"{fewer} < 100 && {fewer}") < 90
        browser.run(f"{svg}.dispatchEvent(new MouseEvent('dblclick'))")
        browser.wait_for(f"{fewer} === 300")
