"""Run the blocks of pages: `python -m scripts.course check|update [PAGE...]`.

    check     run every block of the pages, and compare its output with the page
    update    run every block, write its output into the page, and keep its figures in the folder `figures` of the page

A PAGE is a name such as 01_memory or a path; without one these are all of docs/course and docs/explanation. `parts` is
docs/parts.md. Commands run in an empty folder with links to the checkout, so a page writes nothing into it. The Python
blocks of a page are one process with 8 fake CPU devices, which runs after the page's commands; a block of parts is a
process of its own. Only stdout is compared. The exit code is 1 if a page differs.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.page_blocks import Block, Command, PythonBlock, matches, read_page, tidy, updated
from ultrascale_jax.cli.command_line import user_errors
from ultrascale_jax.config import require

ROOT = Path(__file__).parents[1]
DOCS = Path("docs")
FOLDERS = ("course", "explanation")
"""Folders of docs/ whose pages run."""
NAMED = ("parts",)
"""Pages of docs/ itself, which run where they are named. Each of their Python blocks is a whole program."""
FIGURES = "figures"
"""The folder of figures in each."""

LIMIT_S = 300
"""Seconds that a command, or the Python of a page, may take."""

END_OF_BLOCK = "-- the block ends here --"
"""Printed after each block of Python."""

ENVIRONMENT = {
    "COLUMNS": "110",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "MPLBACKEND": "agg",
    "NO_COLOR": "1",
    "PYTHONUTF8": "1",
    "TERM": "dumb",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class Failed(Exception):
    """A block did not run, or printed something else; the text says all."""


def main(argv: Sequence[str]) -> int:
    prog = "python -m scripts.course"
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=form)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: all")
    options = parser.parse_args(argv)
    failures = 0
    with user_errors():
        for page in find_pages(options.pages):
            begun = time.monotonic()
            try:
                words = ACTIONS[options.action](page)
            except Failed as failure:
                failures += 1
                print(failure, flush=True)
                continue
            print(f"{page.name}: {words}, {time.monotonic() - begun:.1f} s", flush=True)
    return 1 if failures else 0


def find_pages(names: Sequence[str] = ()) -> list[Path]:
    """Return the pages of these names, or all in `FOLDERS`. `UserError` for one that is not there."""
    paths = [path for name in FOLDERS for path in sorted((ROOT / DOCS / name).glob("*.md"))]
    named = [ROOT / DOCS / f"{name}.md" for name in NAMED]
    pages = {path.stem: path for path in paths + named}
    for name in names:
        require(Path(name).stem in pages, "PAGE", name, f"choose from {', '.join(pages)}")
    return [pages[Path(name).stem] for name in names] or paths


def check(page: Path) -> str:
    """Compare the output of each block with the page, and the figures on the page with the ones that it draws."""
    with checkout() as folder:
        count = 0
        for block, seen in outputs(page, read_page(page), folder):
            count += 1
            if not matches(block.output.lines, seen):
                raise Failed(_mismatch(page, block, seen))
        return f"{count} blocks print what it says, {_figures(page, folder)} figures"


def update(page: Path) -> str:
    """Write the output of each block into the page, and keep the figures that it draws."""
    lines = page.read_text(encoding="utf-8").splitlines()
    changes: list[tuple[Block, list[str]]] = []
    with checkout() as folder:
        for block, seen in outputs(page, read_page(page), folder):
            new = updated(block.output.lines, seen)
            if new is None:
                gone = "lines beside `...` are gone; select others"
                raise Failed(f"{_mismatch(page, block, seen)}\n{gone}")
            if new != block.output.lines:
                changes.append((block, new))
        count = _figures(page, folder)
        for path in _drawn(folder):
            shutil.copyfile(path, ROOT / path.relative_to(folder))
    # From the end, so that the places before stay.
    for block, new in sorted(changes, key=lambda change: -change[0].output.start):
        output = block.output
        written = new if output.fenced else ["```text", *new, "```"]
        lines[output.start : output.end] = written
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{len(changes)} blocks updated, {count} figures"


def _drawn(folder: Path) -> list[Path]:
    """Return the figures that were drawn in a checkout."""
    return sorted((folder / DOCS).glob(f"*/{FIGURES}/*"))


ACTIONS: dict[str, Callable[[Path], str]] = {"check": check, "update": update}


@contextmanager
def checkout() -> Iterator[Path]:
    """Yield a temporary folder with links to the files of the checkout, and empty folders of figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        excluded = {DOCS.name, *FOLDERS, FIGURES, "out", "build", "dist"}
        for source in (Path(), DOCS, *(DOCS / name for name in FOLDERS)):
            (folder / source).mkdir(exist_ok=True)
            for path in (ROOT / source).glob("*"):
                if path.name not in excluded and not path.name.startswith("."):
                    (folder / source / path.name).symlink_to(path)
        for name in FOLDERS:
            (folder / DOCS / name / FIGURES).mkdir()
        yield folder


def outputs(page: Path, blocks: Sequence[Block], folder: Path) -> Iterator[tuple[Block, list[str]]]:
    """Run the commands in the folder in order, then the Python, and yield each block with the lines that it prints.

    Raises:
      Failed: a command ends with another exit code than 0, Python with an exception, or one takes too long.
    """
    python = [block for block in blocks if isinstance(block, PythonBlock)]
    for block in blocks:
        if isinstance(block, Command):
            program, *words = block.words
            module = ["-m", "ultrascale_jax"] if program == "ultrascale" else []
            place = f"{page.name}:{block.line}: {block.text}"
            yield block, tidy(_run([*module, *words], folder, place))
    programs = [[block] for block in python] if page.stem in NAMED else [python] if python else []
    for program in programs:
        script = folder / f"{page.stem}.py"
        script.write_text(_script(program), encoding="utf-8")
        printed = _run([script.name], folder, f"{page.name}: Python").split(f"{END_OF_BLOCK}\n")
        yield from zip(program, map(tidy, printed), strict=False)


def _script(blocks: Sequence[PythonBlock]) -> str:
    """Return the Python of a page as one file, on the lines that it has in the page, which a traceback names."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += [*block.source, f"print({END_OF_BLOCK!r})"]
    return "\n".join(lines) + "\n"


def _run(words: Sequence[str], folder: Path, place: str) -> str:
    """Run Python with these arguments in the folder, and return its output."""
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    # Tests give XLA flags of their own, which change the last bits.
    environ.pop("XLA_FLAGS", None)
    command = [sys.executable, *words]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{place}\ntook longer than {LIMIT_S} s") from None
    if done.returncode:
        raise Failed(f"{place}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _mismatch(page: Path, block: Block, seen: Sequence[str]) -> str:
    expected = block.output.lines
    seen = updated(expected, seen) or seen
    diff = difflib.unified_diff(expected, seen, "the page", "the output", lineterm="", n=2)
    return "\n".join([f"{page.name}:{block.line}: {block.text}", *diff])


def shown(page: Path) -> set[str]:
    """Return the names of the figures that the page shows."""
    return set(re.findall(rf"\]\({FIGURES}/([\w.]+)\)", page.read_text(encoding="utf-8")))


def _figures(page: Path, folder: Path) -> int:
    """Return the number of figures that were drawn; `Failed` unless the page shows these."""
    drawn = {path.name for path in _drawn(folder)}
    if drawn != shown(page):
        words = [f"shows {name}, which no command drew" for name in sorted(shown(page) - drawn)]
        words += [f"does not show {name}, which it draws" for name in sorted(drawn - shown(page))]
        raise Failed("\n".join(f"{page.name}: {word}" for word in words))
    return len(drawn)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
