"""The explorer of the playbook's runs: its place on a page gets the table of runs, and `_static/runs.js` draws it."""

from pathlib import Path
from typing import Any

PLACE = "<!-- runs -->"
"""Where the page gets the explorer."""

RUNS = Path(__file__).parents[2] / "tests/data/plan/playbook_runs.csv"

SCRIPTS = ("charts.js", "runs.js")
"""Scripts of `html_static_path`, in this order."""


def explorer() -> str:
    """Return the HTML that the scripts fill; it contains the runs, since a page of a folder can fetch nothing."""
    return f'<div id="runs"></div>\n<script type="text/csv" id="runs-csv">\n{RUNS.read_text()}</script>'


def add_runs(app: Any, page: str, source: list[str]) -> None:
    """Put the explorer into a page that has the place for it."""
    if PLACE in source[0]:
        app.env.note_dependency(RUNS)
        source[0] = source[0].replace(PLACE, f"```{{raw}} html\n{explorer()}\n```")


def add_scripts(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Load the scripts on a page with the explorer."""
    if 'id="runs"' in context.get("body", ""):
        for name in SCRIPTS:
            app.add_js_file(name, loading_method="defer")


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx complete a page as it reads it."""
    app.connect("source-read", add_runs)
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
