"""The blocks of a Markdown page that run: commands with the output they print, and Python with its own.

A block ```console holds lines `$ COMMAND` (a trailing backslash continues one), each followed by the command's
output. A block ```python may be followed by a block ```text with its output. In an output, a line `...` matches
any lines.
"""

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ultrascale_jax.config import require

REST = "..."
"""The line of an output that matches any lines."""

PROGRAMS = ("ultrascale", "python")
"""Programs with which a command may begin."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Lines that a command or a block of Python prints, as a page has them."""

    lines: list[str]
    start: int
    """Index of the first line in the page; where there is none, of the line before which it belongs."""
    fenced: bool = True
    """Whether a block is there that holds it."""

    @property
    def end(self) -> int:
        return self.start + len(self.lines)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a page."""

    line: int
    """Its number in the page, from 1."""
    words: list[str]
    output: Output

    @property
    def text(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True, kw_only=True)
class PythonBlock:
    """One block of Python of a page."""

    line: int
    """The number of its first line of code, from 1."""
    source: list[str]
    output: Output

    @property
    def text(self) -> str:
        return f"python: {self.source[0] if self.source else ''}"


type Block = Command | PythonBlock


def read_page(path: Path) -> list[Block]:
    """Return the commands and Python blocks of a page in order. `UserError` for a command that cannot run."""
    text = path.read_text(encoding="utf-8")
    tokens = MarkdownIt().parse(text)
    blocks: list[Block] = []
    for token, following in itertools.pairwise([*tokens, Token("end", "", 0)]):
        if token.type != "fence" or token.map is None:
            continue
        start, end = token.map
        source = token.content.splitlines()
        if token.info.strip() == "console":
            blocks += _commands(path, text.splitlines(), start + 1, end - 1)
        elif token.info.strip() == "python":
            output = Output(lines=[], start=end, fenced=False)
            if following.type == "fence" and following.info == "text" and following.map:
                output = Output(lines=following.content.splitlines(), start=following.map[0] + 1)
            blocks.append(PythonBlock(line=start + 2, source=source, output=output))
    return blocks


def _commands(path: Path, lines: Sequence[str], start: int, end: int) -> list[Command]:
    """Return the commands of the block with the lines `start` to `end`."""
    commands: list[Command] = []
    at = start
    while at < end:
        line, place = at + 1, f"{path.name}:{at + 1}"
        require(lines[at].startswith("$ "), "console", place, "must begin with a line `$ COMMAND`")
        while lines[at].endswith("\\") and at + 1 < end:
            at += 1
        text = "\n".join(lines[line - 1 : at + 1])[2:]
        words = shlex.split(text.replace("\\\n", "")) or [""]
        fix = f"must begin with one of {', '.join(PROGRAMS)}"
        require(words[0] in PROGRAMS, "command", f"{place} {' '.join(words)}", fix)
        at += 1
        output = list(itertools.takewhile(lambda text: not text.startswith("$ "), lines[at:end]))
        expected = Output(lines=output, start=at)
        commands.append(Command(line=line, words=words, output=expected))
        at += len(output)
    return commands


def tidy(text: str) -> list[str]:
    """Return the lines of an output without blanks at their ends, or blank lines at its own."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def matches(expected: Sequence[str], seen: Sequence[str]) -> bool:
    """Return whether `seen` is `expected`, where a line `...` matches any lines."""
    return _selection(tidy("\n".join(expected)), seen, lambda line: line) is not None


def updated(expected: Sequence[str], seen: Sequence[str]) -> list[str] | None:
    """Return the lines of `seen` that `expected` selects; None if some of them are gone.

    Without `...` these are all. With it, a line matches by its words; its numbers may differ.
    """
    expected = tidy("\n".join(expected))
    if REST not in expected or matches(expected, seen):
        return list(seen) if REST not in expected else expected
    return _selection(expected, seen, _words)


def _words(line: str) -> str:
    """Return a line without its digits and the width of columns and rules, which change with the numbers."""
    return re.sub(r"[\s─━┃│-]+", " ", re.sub(r"[-+]?\d[\d,.]*", "#", line)).strip()


def _selection(expected: Sequence[str], seen: Sequence[str], key) -> list[str] | None:
    """Return `expected` with each line replaced by the one of `seen` with an equal key, in order; None without such."""
    groups = [
        list(group)
        for is_rest, group in itertools.groupby(expected, lambda line: line == REST)
        if not is_rest
    ]
    keys = [key(line) for line in seen]
    anchored, open_end = expected[:1] != [REST], expected[-1:] == [REST]
    made: list[str] = [] if anchored else [REST]
    at = 0
    for n, group in enumerate(groups):
        group_keys = [key(line) for line in group]
        places = range(at, len(keys) - len(group_keys) + 1)
        if n == 0 and anchored:
            places = places[:1]
        if n == len(groups) - 1 and not open_end:
            places = [place for place in places if place == len(keys) - len(group_keys)]
        start = next((p for p in places if keys[p : p + len(group_keys)] == group_keys), None)
        if start is None:
            return None
        at = start + len(group_keys)
        made += seen[start:at]
        if n < len(groups) - 1 or open_end:
            made.append(REST)
    return made if groups or REST in expected or not seen else None
