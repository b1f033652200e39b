"""Numbers of the pages equal the files that commands write, and the planner's answers where these are cheap."""

import csv
import re
from pathlib import Path

from scripts.validation import accuracy
from ultrascale_jax.cli import plan

ROOT = Path(__file__).parents[3]
TABLES = ROOT / "docs" / "planning"
GIB = 2**30


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def text(page: str) -> str:
    """Return a page as one line."""
    return " ".join((ROOT / page).read_text().split())


def text_lines(page: str) -> list[str]:
    return (ROOT / page).read_text().splitlines()


def table(page: str, columns: int) -> list[list[str]]:
    """Return the cells of the rows of a page's tables that have so many columns and begin with a digit."""
    lines = [x for x in text_lines(page) if x.startswith("| ")]
    cells = [[cell.strip() for cell in x.strip("|").split("|")] for x in lines]
    return [x for x in cells if len(x) == columns and x[0][0].isdigit()]


def test_the_page_of_accuracy_is_what_its_script_writes():
    assert accuracy.PAGE.read_text() == accuracy.page()


def test_the_readme_has_the_held_out_errors_of_the_page_of_accuracy():
    page, readme = accuracy.PAGE.read_text(), text("README.md")
    for name, words in (
        ("memory_xla", "{} in the median and {} at most on"),
        ("experts", "{} and {} ("),
    ):
        runs, *errors = re.search(
            rf"\| held out \| \[{name}\].* \| (\d+) \| (\S+) \| (\S+) \|", page
        ).groups()
        assert (
            f"{words.format(*errors)}{'' if name == 'experts' else ' '}{runs} held-out runs"
            in readme
        )
    for cell in ("median", "worst"):
        choice = re.search(rf"\| first choice over best, {cell} cell \| (\S+) \|", page)[1]
        assert choice in readme


def test_the_rows_beside_maxtext_are_those_of_its_file():
    with (ROOT / "docs/benchmarks/maxtext.csv").open() as file:
        found = {
            (f"{float(r['gib'] or 0):.1f}", f"{float(r['step_ms'] or 0):,.0f}")
            for r in csv.DictReader(file)
        }
    lines = [
        x.strip("|").split("|") for x in text_lines("docs/benchmarks/h100.md") if x.count("|") == 8
    ]
    shown = [
        [cell.strip() for cell in line] for line in lines if re.fullmatch(r" \d\.\d\d ", line[-1])
    ]
    assert len(shown) == 8
    for _, _, theirs_gib, theirs_ms, ours_gib, ours_ms, ratio in shown:
        assert {(theirs_gib, theirs_ms), (ours_gib, ours_ms)} <= found
        milliseconds = [float(ms.replace(",", "")) for ms in (theirs_ms, ours_ms)]
        assert abs(milliseconds[0] / milliseconds[1] - float(ratio)) < 0.01


def test_the_page_of_long_sequences_has_the_rows_of_its_file():
    found = {
        (r["seq_len"], r["mesh"], r["remat"], f"{int(r['xla_bytes']) / GIB:.1f}", f"{step:.2f}")
        for r in rows("context")
        if r["model"] == "LLAMA3_8B" and (step := float(r["step_s"]))
    }
    # The columns: tokens, GPUs, mesh, attention, remat, GiB, step and five more.
    shown = {
        (c[0].replace(",", ""), c[2].strip("`"), c[4], c[5], c[6])
        for c in table("docs/benchmarks/h100.md", 10)
    }
    assert len(shown) == 9 and shown <= found


def test_the_page_of_experts_has_the_rows_of_its_file():
    found = set()
    for r in rows("experts"):
        ep = re.search(r"ep=(\d+)", r["mesh"])
        if r["model"] == "QWEN3_30B_A3B" and r["layers"] == "all" and ep:
            nodes = [f"{r['nodes']} nodes"] if r["nodes"] != "1" else []
            ways = [*nodes, *(["overlap"] if r["overlap"] == "on" else [])]
            gib, step = int(r["xla_bytes"]) / GIB, float(r["step_s"])
            found.add((ep[1], ", ".join(ways) or "at once", f"{gib:.1f}", f"{step:.3f}"))
    shown = {tuple(c[:4]) for c in table("docs/benchmarks/h100.md", 7)}
    assert len(shown) == 6 and shown <= found


def test_the_first_answer_of_the_guide_to_planning_is_the_planners(capsys):
    page = (ROOT / "docs/planning.md").read_text()
    command, answer = re.search(
        r"\$ ultrascale (plan memory .*none)\n +\.\.\.\n +(.*)\n", page
    ).groups()
    plan.main(command.split()[1:])
    assert capsys.readouterr().out.splitlines()[-1] == answer
