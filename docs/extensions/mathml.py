"""Formulas as MathML, which browsers draw by themselves: the site loads nothing from the network and runs no script."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

logger = logging.getLogger(__name__)


def formula(node: nodes.Element, display: str) -> str:
    """Return the MathML of a node's TeX; what is not understood is a warning, thus an error of `make docs`."""
    text = node.astext()
    try:
        made = convert(text, display=display)
    except Exception as error:  # its errors have no class in common
        logger.warning("formula %r: %s", text, type(error).__name__, location=node)
        return ""
    if "<mi>\\" in made:
        logger.warning("formula %r has a command without MathML", text, location=node)
    return made


def visit_inline(translator: Any, node: nodes.Element) -> None:
    """Write a formula within a line."""
    translator.body.append(formula(node, "inline"))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.Element) -> None:
    """Write a formula of its own, which scrolls where the page is narrow."""
    translator.body.append(f'<div class="math">{formula(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx render formulas by these functions."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
