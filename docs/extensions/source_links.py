"""The role {src}`PATH#NAME`: a link to a page of the site that shows a source file, at the line that defines NAME.

PATH starts at the repository's root; NAME is a function, a class, a constant, or a dotted name such as `Class.method`.
`#NAME` may be left out. A file or a name that does not exist is a warning, thus an error of `make docs`. viewcode has
pages only for modules that autodoc imports; these exist for every file that a page names.

The path of a source file in backquotes is such a link too, from the repository's root, the package or the tests:
`sharding/rules.py`. If its folder is one of ours, but the file is not there, that is a warning.
"""

import ast
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.util import logging
from sphinx.util.docutils import ReferenceRole

ROOT = Path(__file__).resolve().parents[2]
BASES = (ROOT, ROOT / "ultrascale_jax", ROOT / "tests")
"""Where a path in backquotes may begin."""
CODE = re.compile(r"[a-z.][\w.-]*(?:/[a-z_][\w.-]*)+\.(?:py|sh|yaml|toml)")
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Room for 100 columns in furo's theme, and its color of the heading that a link leads to for our lines.
STYLE = """<style>
.content { width: 58em; max-width: 100% }
.content h1 { font-size: 1.5em }
.content pre { font-size: 12.5px }
.highlight span:target { background: var(--color-highlight-on-target, #ffc) }
</style>"""

logger = logging.getLogger(__name__)


def definitions(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that the body of a module, class or function defines, and the node that defines it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield child.name, child
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, child
        else:
            yield from definitions(child)


def find_line(path: Path, name: str) -> int:
    """Return the line of a Python file that defines `name`; dots lead into classes. `ValueError` if there is none."""
    if path.suffix != ".py":
        raise ValueError(f"{path.name} is not Python: leave '#{name}' out")
    node: Any = ast.parse(path.read_text())
    for part in name.split("."):
        named = dict(reversed([*definitions(node)]))  # the first of a name wins
        if part not in named:
            near = get_close_matches(part, named)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(f"{path.name} defines no '{name}'{hint}")
        node = named[part]
    return node.lineno


class SourceRole(ReferenceRole):
    """Parse {src}`PATH#NAME`, or {src}`WORDS <PATH#NAME>`."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the reference, whose address `link` fills in for the builder."""
        file, _, name = self.target.partition("#")
        path = (ROOT / file).resolve()
        kind = nodes.inline if self.has_explicit_title else nodes.literal
        text = kind(self.rawtext, self.words(file, name))
        try:
            if not (path.is_file() and path.is_relative_to(ROOT)):
                raise ValueError(f"the repository has no file {file}")
            line = find_line(path, name) if name else None
        except ValueError as error:
            logger.warning("{src}`%s`: %s", self.target, error, location=self.get_location())
            return [text], []
        return [reference(self.env, path, line, text, self.target)], []

    def words(self, path: str, name: str) -> str:
        """Return `module.name`, or the path below the package, where no other words are given."""
        if self.has_explicit_title:
            return self.title
        if not name:
            return path.removeprefix("ultrascale_jax/")
        file = Path(path)
        return f"{file.parent.name if file.stem == '__init__' else file.stem}.{name}"


def reference(
    env: Any, path: Path, line: int | None, text: nodes.Node, title: str
) -> nodes.reference:
    """Make a reference of the page that is being read to a file's page, whose address `link` fills in later."""
    file = path.relative_to(ROOT).as_posix()
    env.note_dependency(path)
    # Sphinx forgets a page's metadata when it reads the page again.
    env.metadata[env.docname].setdefault("source files", []).append(file)
    made = nodes.reference("", "", text, reftitle=title)
    made["source_page"], made["source_anchor"] = f"source/{file}", f"#L-{line}" if line else ""
    return made


def link_paths(app: Any, doctree: nodes.document) -> None:
    """Make each path of a source file in backquotes a link."""
    for node in list(doctree.findall(nodes.literal)):
        text = node.astext()
        if not CODE.fullmatch(text) or isinstance(node.parent, nodes.reference):
            continue
        folder = text.partition("/")[0]
        paths = [base / text for base in BASES if (base / text).is_file()]
        if paths:
            node.replace_self(reference(app.env, paths[0].resolve(), None, node.deepcopy(), text))
        elif any((base / folder).is_dir() for base in BASES):
            logger.warning("`%s`: the repository has no such file", text, location=node)


def link(app: Any, doctree: nodes.document, page: str) -> None:
    """Give each reference of a page its address."""
    for node in doctree.findall(nodes.reference):
        if "source_page" in node:
            address = app.builder.get_relative_uri(page, node["source_page"])
            node["refuri"] = address + node["source_anchor"]


def source_pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield a page of the site for each file that a page names."""
    files = {file for page in app.env.metadata.values() for file in page.get("source files", [])}
    for file in sorted(files):
        try:
            language = get_lexer_for_filename(file).aliases[0]
        except ClassNotFound:
            language = "none"
        code = app.builder.highlighter.highlight_block(
            (ROOT / file).read_text(), language, linenos="inline", linespans="L"
        )
        body = f"<h1>{file}</h1>{STYLE}{code}"
        yield f"source/{file}", {"title": file, "body": body}, "page.html"


def setup(app: Any) -> dict[str, bool]:
    """Register the role and its pages."""
    app.add_role("src", SourceRole())
    app.connect("doctree-read", link_paths)
    app.connect("doctree-resolved", link)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True}
