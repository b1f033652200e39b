"""Sphinx builds the site from these pages: `make docs`. The folder `extensions` adds to it."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import ultrascale_jax

sys.path.insert(0, str(Path(__file__).parent))

project = "ultrascale_jax"
author = "The ultrascale_jax developers"
version = release = ultrascale_jax.__version__
extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
    *("extensions.options", "extensions.exit_codes", "extensions.source_links", "extensions.runs"),
]
# Without the extra `docs` formulas need MathJax from the network.
if importlib.util.find_spec("latex2mathml"):
    extensions.append("extensions.mathml")
html_theme = "furo"
html_show_copyright = False  # CITATION.cff and LICENSE say who owns what
html_title = f"ultrascale_jax {version}"
html_static_path = ["_static", "../ultrascale_jax/web/static/charts.js"]
html_css_files = ["site.css", "print.css"]
# Commands and their output have no language.
highlight_language = "none"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
autodoc_typehints = "description"
autodoc_member_order = "alphabetical"


def as_code(*event: Any) -> None:
    """Turn a docstring's `words` into code: reStructuredText needs two backticks."""
    lines: list[str] = event[-1]
    text = re.sub(
        r"(?<!`)`([^`]+)`(?!`)", lambda m: f"``{' '.join(m[1].split())}``", "\n".join(lines)
    )
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Read our docstrings before Sphinx's own extensions do."""
    app.connect("autodoc-process-docstring", as_code, priority=400)
