"""The planner's page in a real browser: a changed field changes the numbers, to those of the command line."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.chromium import Chromium, needs_chromium
from ultrascale_jax.cli import plan

pytestmark = needs_chromium

CELL = "document.querySelector('#summary tbody tr')?.cells[{}].textContent"
MEMORY, STEP = CELL.format(2), CELL.format(4)
HOSTILE = "</script><img src=x onerror=\"document.title='ran'\">"


@pytest.fixture(scope="module")
def url():
    """The address of a page that the command serves."""
    command = [sys.executable, "-m", "ultrascale_jax", "plan", "serve", "llama3_8b", "--gpus", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def command_says(browser, capsys):
    """GiB of the peak, by the command line that the page shows."""
    words = shlex.split(browser.run('document.querySelector("code[data-name=memory]").textContent'))
    plan.main([*words[2:], "--json"])
    return f"{json.loads(capsys.readouterr().out)['peak_bytes'] / 2**30:.1f} GiB"


def test_a_changed_field_changes_what_is_drawn_to_what_the_command_says(url, capsys):
    with Chromium(url, 1400, 1200) as browser:
        first = browser.wait_for(MEMORY)
        assert first == command_says(browser, capsys)
        browser.type_into('[name="mesh.sp"]', "4")
        browser.wait_for(f"{MEMORY} !== {json.dumps(first)}")
        assert "mesh.sp=4" in browser.run("location.hash")
        assert browser.run(MEMORY) == command_says(browser, capsys)
        axes = browser.run(
            '[...document.querySelectorAll("#axes tbody tr")].map((r) => r.innerText)'
        )
        assert [row.split()[:2] for row in axes] == [["fsdp", "16"], ["sp", "4"]]

        # By typing; the sum of the table is the number of the tile.
        browser.type_into('[name="data.seq_len"]', "32768")
        browser.wait_for(
            'document.querySelector("code[data-name=memory]").textContent.includes("32768")'
        )
        assert browser.run(MEMORY) == command_says(browser, capsys)
        total = browser.run(
            'document.querySelector("#parts tbody tr:last-child").cells[1].textContent'
        )
        assert browser.run(MEMORY) == f"{total} GiB"

        # A mistake stands beside its field, and goes with it.
        browser.type_into('[name="mesh.tp"]', "3")
        said = browser.wait_for('document.getElementById("field-mesh.tp-error").textContent')
        assert "does not divide 64 devices" in said
        assert browser.run('document.getElementById("results").className') == "stale"
        browser.type_into('[name="mesh.tp"]', HOSTILE)
        browser.wait_for('document.getElementById("alert").textContent.includes("whole number")')
        browser.type_into('[name="mesh.tp"]', "1")
        browser.wait_for('document.getElementById("alert").textContent === ""')
        assert browser.run("document.title") == "Planner" and browser.errors == []


def test_a_link_shows_the_same_beside_what_was_kept_also_on_a_phone(url, capsys):
    kept = "recipe%3Dllama3_8b%26gpus%3D64%26train.remat%3Dfull"
    link = (
        f"{url}#recipe=llama3_8b&gpus=8&train.remat=none&train.microbatches=64&over=gpu&vs={kept}"
    )
    with Chromium(link, 360, 740) as browser:
        assert browser.wait_for(MEMORY) == command_says(browser, capsys)
        assert "kept: " in browser.run('document.getElementById("summary").innerText')
        bars = browser.run('document.querySelectorAll("#memory .track").length')
        assert bars == 2 and browser.run('document.getElementById("over").value') == "gpu"
        assert browser.run("document.documentElement.scrollWidth") == 360
        # What does not fit comes with a way out, which one press takes.
        browser.wait_for('document.querySelectorAll("#hint button").length')
        browser.run('document.querySelector("#hint button").click()')
        browser.wait_for('Boolean(document.querySelector("#summary tbody tr .good"))')
        assert browser.run(MEMORY) == command_says(browser, capsys)
        assert browser.errors == []


def test_the_search_fills_the_best_mesh_in(url):
    with Chromium(f"{url}#recipe=debug&gpus=4", 1000, 800) as browser:
        browser.wait_for(MEMORY)
        browser.run('document.getElementById("pinned").value = "pp=1,zero=3"')
        browser.run('document.getElementById("suggest").click()')
        best = browser.wait_for('document.querySelector("#found tbody td")?.textContent')
        browser.wait_for('location.hash.includes("mesh.fsdp")')
        shown = 'document.querySelector("code[data-name=train]").textContent'
        browser.wait_for(f"{shown}.includes('--train.remat {best.split()[-1]}')")
        step = browser.run('document.querySelector("#found tbody td:nth-child(3)").textContent')
        browser.wait_for(f"{STEP} === {json.dumps(step)}")
        assert browser.errors == []


def test_a_row_of_the_sweep_has_the_numbers_of_its_page_and_one_press_shows_it(url):
    with Chromium(f"{url}#recipe=llama3_8b&gpus=64&over=mesh.sp", 1000, 800) as browser:
        browser.wait_for('document.querySelectorAll("#sweep tbody tr").length === 7')
        row = 'document.querySelectorAll("#sweep tbody tr")[2]'
        value, _, memory, step, *_ = browser.run(f"[...{row}.cells].map((one) => one.innerText)")
        assert value == "4"
        browser.run(f"{row}.querySelector('button').click()")
        browser.wait_for(f"{STEP} === {json.dumps(step)} && location.hash.includes('mesh.sp=4')")
        assert browser.run(MEMORY) == f"{memory} GiB"
        browser.wait_for(f"Boolean({row}.querySelector('button.current'))")
        # The arrow keys choose a GPU of the map.
        browser.run('document.querySelector("#map svg").focus()')
        browser.press("ArrowRight")
        said = browser.wait_for('document.getElementById("gpu").textContent')
        assert said.startswith("GPU 1 in node 0 of 8 is fsdp 1 of 16, sp 2 of 4")
        assert browser.errors == []
