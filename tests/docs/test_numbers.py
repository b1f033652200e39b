"""Numbers of the pages equal the files that commands write, and the planner's answers where these are cheap."""

import csv
import re
import statistics
from pathlib import Path

import pytest

from ultrascale_jax.cli import plan

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs" / "planning"
GIB = 2**30


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def text(page: str) -> str:
    """Return a page as one line."""
    return " ".join((ROOT / page).read_text().split())


def table(page: str, columns: int) -> list[list[str]]:
    """Return the cells of the rows of a page's tables that have so many columns and begin with a digit."""
    lines = [x for x in (ROOT / page).read_text().splitlines() if x.startswith("| ")]
    cells = [[cell.strip() for cell in x.strip("|").split("|")] for x in lines]
    return [x for x in cells if len(x) == columns and x[0][0].isdigit()]


@pytest.mark.parametrize("page", ["README.md", "docs/planning.md"])
def test_the_errors_of_memory_are_those_of_the_tables(page):
    held = [abs(float(r["error_pct"])) for r in rows("memory_xla") if r["held"] == "held"]
    experts = [abs(float(r["error_pct"])) for r in rows("experts")]
    median, worst = statistics.median(held), max(held)
    assert f"{median:.1f}% in the median and {worst:.1f}% at most" in text(page)
    median, worst = statistics.median(experts), max(experts)
    assert f"{median:.1f}% and {worst:.1f}%" in text(page)
    assert f"{len(held)} held-out runs" in text(page) and f"{len(experts)} runs" in text(page)


def test_the_ranges_of_predicted_times_are_those_of_the_tables():
    for name in ("context", "experts"):
        ratios = [float(r["formula_step_s"]) / float(r["step_s"]) for r in rows(name)]
        range_of = f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} |"
        assert f"| {len(ratios)} | {range_of}" in text("docs/planning.md")


def test_the_page_of_long_sequences_has_the_rows_of_its_file():
    found = {
        (r["seq_len"], r["mesh"], r["remat"], f"{int(r['xla_bytes']) / GIB:.1f}", f"{step:.2f}")
        for r in rows("context")
        if r["model"] == "LLAMA3_8B" and (step := float(r["step_s"]))
    }
    # The columns: tokens, GPUs, mesh, attention, remat, GiB, step and five more.
    shown = {
        (c[0].replace(",", ""), c[2].strip("`"), c[4], c[5], c[6])
        for c in table("docs/benchmarks/h100_context.md", 12)
    }
    assert len(shown) > 20 and shown <= found


def test_the_page_of_experts_has_the_rows_of_its_file():
    found = set()
    for r in rows("experts"):
        ep = re.search(r"ep=(\d+)", r["mesh"])
        if r["model"] == "QWEN3_30B_A3B" and r["layers"] == "all" and ep:
            nodes = f", {r['nodes']} nodes" if r["nodes"] != "1" else ""
            overlap = ", overlap" if r["overlap"] == "on" else ""
            gib, step = int(r["xla_bytes"]) / GIB, float(r["step_s"])
            found.add((ep[1], f"{r['dispatch']}{nodes}{overlap}", f"{gib:.1f}", f"{step:.3f}"))
    shown = {tuple(c[:4]) for c in table("docs/benchmarks/h100_experts.md", 7)}
    assert len(shown) > 10 and shown <= found


def test_the_first_answer_of_the_guide_to_planning_is_the_planners(capsys):
    page = (ROOT / "docs/planning.md").read_text()
    command, answer = re.search(
        r"\$ ultrascale (plan memory .*none)\n +\.\.\.\n +(.*)\n", page
    ).groups()
    plan.main(command.split()[1:])
    assert capsys.readouterr().out.splitlines()[-1] == answer
