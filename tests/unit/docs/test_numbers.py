"""Numbers of the pages equal the files that commands write, and the planner's answers where these are cheap."""

import re
from pathlib import Path

from scripts.validation import accuracy
from ultrascale_jax.cli import plan

ROOT = Path(__file__).parents[3]


def text(page: str) -> str:
    """Return a page as one line."""
    return " ".join((ROOT / page).read_text().split())


def test_the_page_of_accuracy_is_what_its_script_writes():
    assert accuracy.PAGE.read_text() == accuracy.page()


def test_the_readme_has_the_held_out_errors_of_the_page_of_accuracy():
    page, readme = accuracy.PAGE.read_text(), text("README.md")
    for name, words in (
        ("memory_xla", "{} in the median and {} at most on"),
        ("experts", "{} and {} ("),
    ):
        runs, *errors = re.search(rf"\| \[{name}\].* \| (\d+) \| (\S+) \| (\S+) \|", page).groups()
        assert (
            f"{words.format(*errors)}{'' if name == 'experts' else ' '}{runs} held-out runs"
            in readme
        )
    row = r"\| {} \| no pipeline \| bf16 \| \d+ \| .* \| (\S+) \((.*)-(.*)\) \|"
    (maxtext, *ends), (nemo, *others) = (
        re.search(row.format(trainer), page).groups() for trainer in ("MaxText", "NeMo Megatron")
    )
    assert f"{maxtext} of their speed in the median for MaxText ({' to '.join(ends)})" in readme
    assert f"{nemo} for NeMo ({' to '.join(others)})" in readme
    for cell in ("median", "worst"):
        choice = re.search(rf"\| first choice over best, {cell} cell \| (\S+) \|", page)[1]
        assert choice in readme


def test_the_first_answer_of_the_guide_to_planning_is_the_planners(capsys):
    page = (ROOT / "docs/planning.md").read_text()
    command, answer = re.search(
        r"\$ ultrascale (plan memory .*none)\n +\.\.\.\n +(.*)\n", page
    ).groups()
    plan.main(command.split()[1:])
    assert capsys.readouterr().out.splitlines()[-1] == answer
