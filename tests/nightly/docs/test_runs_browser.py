"""The explorer of chapter 12 in a real browser: what it selects and shows is what the table of runs has."""

import csv
import subprocess
import sys

import pytest

from docs.extensions.runs import PLACE, RUNS
from tests.chromium import Chromium, needs_chromium

pytestmark = needs_chromium

CONF = f"""
from runpy import run_path
docs = {str(RUNS.parents[3] / "docs")!r}
conf = run_path(docs + "/conf.py")
extensions, html_theme = ["myst_parser", "extensions.runs"], "furo"
html_static_path = [f"{{docs}}/{{path}}" for path in conf["html_static_path"]]
html_css_files = conf["html_css_files"]
"""

STATUS = 'document.querySelector("#runs p").textContent'
ROWS = '[...document.querySelectorAll("#runs tbody tr")].map((one) => one.innerText.split(/\\s+/))'
LINES = 'document.querySelectorAll("#runs polyline").length'
CHOOSE = """{{ const select = document.querySelector('#runs [name="{}"]');
select.value = "{}"; select.dispatchEvent(new Event("change")); }}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The address of a site of one page, which has the explorer."""
    source, site = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    (source / "conf.py").write_text(CONF)
    (source / "index.md").write_text(f"# Runs\n\n{PLACE}\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(source), str(site)]
    subprocess.run(command, check=True)
    return (site / "index.html").as_uri()


def runs(**settings):
    """The runs of the file with these settings, the highest MFU first, and how many of them failed."""
    with RUNS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if settings.items() <= row.items()]
    ran = [row for row in rows if row["mfu_pct"] != "nan"]
    return sorted(ran, key=lambda row: -float(row["mfu_pct"])), len(rows) - len(ran)


def test_filters_and_a_drag_select_runs_and_the_table_has_the_fastest(page):
    with Chromium(page, 1400, 1000) as browser:
        ran, failed = runs()
        browser.wait_for(f"{LINES} === {len(ran) + failed}")
        assert browser.run(STATUS) == f"1,643 of 1,643 runs, {failed} of which failed."
        for name, value in (("model", "8B"), ("tp", "8"), ("GPUs", "128")):
            browser.run(CHOOSE.format(name, value))
        ran, failed = runs(model="8B", tp="8", nodes="16")
        assert (
            browser.run(STATUS) == f"{len(ran) + failed} of 1,643 runs, {failed} of which failed."
        )
        assert browser.run(LINES) == len(ran) + failed
        best = [float(row[9]) for row in browser.run(ROWS)]
        assert best == [float(row["mfu_pct"]) for row in ran[:15]]

        # A drag over the upper half of the axis of MFU leaves what is above; a click brings all back.
        box = browser.run(
            """{ const { x, y, width, height } = document.querySelector('[data-name="MFU %"]')
            .getBoundingClientRect(); ({ x: x + width / 2, y, height }); }"""
        )
        ends = box["y"] + box["height"] / 2, box["y"] - 5
        browser.drag((box["x"], ends[0]), (box["x"], ends[1]))
        fast = [row for row in ran if float(row["mfu_pct"]) > float(runs()[0][0]["mfu_pct"]) / 2]
        assert 0 < len(fast) < len(ran) and browser.run(LINES) == len(fast)
        browser.drag((box["x"], ends[0]), (box["x"], ends[0]))
        assert browser.run(LINES) == len(ran) + failed

        # The head of a column sorts by it.
        browser.run('document.querySelectorAll("#runs th")[8].click()')
        memory = [float(row[8]) for row in browser.run(ROWS)]
        assert memory == sorted((float(row["mem_gb"]) for row in ran), reverse=True)[:15]
        browser.run('document.querySelector("#runs button").click()')
        assert browser.run(LINES) == 1643 and browser.errors == []
