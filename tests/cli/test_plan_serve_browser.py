"""The planner's page in a real browser: a changed field changes the numbers, to those of the command line."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.cli.chromium import Chromium
from ultrascale_jax.cli import plan

pytestmark = pytest.mark.browser

TILE = 'document.querySelector("#tiles [data-name=\\"{}\\"] .value")?.textContent'
MEMORY, STEP = TILE.format("memory of one GPU"), TILE.format("step")
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
        # By keys: the next divisor of the GPUs.
        browser.run('document.getElementById("field-mesh.sp").focus()')
        browser.press("ArrowUp")
        browser.press("ArrowUp")
        browser.wait_for(f"{MEMORY} !== {json.dumps(first)}")
        assert browser.run('document.getElementById("field-mesh.sp").value') == "4"
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
        total = browser.run('document.querySelector("#parts tfoot td:nth-child(2)").textContent')
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
        assert "kept: " in browser.run('document.getElementById("tiles").innerText')
        bars = browser.run('document.querySelectorAll("#memory .bar").length')
        assert bars == 2 and browser.run('document.getElementById("over").value') == "gpu"
        assert browser.run("document.documentElement.scrollWidth") == 360
        # What does not fit comes with a way out, which one press takes.
        browser.wait_for('document.querySelectorAll("#verdict button").length')
        browser.run('document.querySelector("#verdict button").click()')
        browser.wait_for('document.querySelectorAll("#tiles .good").length')
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
        assert f"--train.remat {best.split()[-1]}" in browser.wait_for(shown)
        step = browser.run('document.querySelector("#found tbody td:nth-child(3)").textContent')
        browser.wait_for(f"{STEP} === {json.dumps(step)}")
        assert browser.errors == []


def test_an_exported_file_shows_its_grid_and_says_what_it_has_not(tmp_path, capsys):
    file = tmp_path / "out/planner.html"
    plan.main(["serve", "debug", "--gpus", "4", "--mesh", "fsdp=4", "--export", str(file)])
    assert capsys.readouterr().out == f"wrote {file}\n"
    with Chromium(f"{file.as_uri()}#recipe=debug&mesh.sp=2&over=train.remat", 1000, 800) as browser:
        shown = browser.wait_for('document.querySelector("#tiles .value")?.textContent')
        command = browser.run('document.querySelector("code[data-name=memory]").textContent')
        plan.main([*shlex.split(command)[2:], "--json"])
        peak = json.loads(capsys.readouterr().out)["peak_bytes"]
        assert "sp=2" in command and shown == f"{peak / 2**30:.2f} GiB"
        assert browser.run('document.querySelectorAll("#sweep-memory .column").length') == 4
        browser.type_into('[name="data.seq_len"]', "300")
        browser.wait_for(
            'document.getElementById("alert").textContent.includes("this file has 128")'
        )
        assert browser.run('document.getElementById("field-gpus").disabled')
        assert browser.errors == []
