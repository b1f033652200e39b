"""Every example of `docs/parts.md` runs alone, is short, and prints the text under it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parts.md").read_text()
EXAMPLES = {
    heading: (source, printed)
    for heading, section in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    for source, printed in re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", section, re.DOTALL)
}
MOST_LINES = 25


def test_every_section_has_one_short_example_with_its_output():
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert headings == list(EXAMPLES) and PAGE.count("```python") == len(headings)
    lengths = {name: len(source.splitlines()) for name, (source, _) in EXAMPLES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_example_prints_its_text(heading, tmp_path, monkeypatch, capsys):
    source, printed = EXAMPLES[heading]
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    exec(compile(source, f"docs/parts.md, {heading}", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_search_needs_no_jax():
    code = EXAMPLES["Search"][0] + "\nimport sys\nassert 'jax' not in sys.modules and cfg.check(8)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
