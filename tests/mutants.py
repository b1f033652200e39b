"""Break the code on purpose, and see that the tests which should notice do: `python -m tests.mutants`.

Each mutant of `mutants.toml` is a bug that somebody could make. In a copy of the tree a text of one file is replaced by
another, and the tests that should fail run there. Before that the same tests run on an unchanged copy: all must pass.
"""

import argparse
import dataclasses
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
LIMIT_S = 300.0
PASSED, FAILED = 0, 1
"""Exit codes of pytest; another one is that of tests that did not run, or of a process that died."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug."""

    name: str
    file: str
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: str
    """Arguments of pytest: the file that should notice, and with `-k` which of its tests."""
    idea: str

    def fault(self) -> str | None:
        """Why this mutant cannot be made any more; none if it can."""
        path, test = ROOT / self.file, ROOT / shlex.split(self.tests)[0]
        found = path.read_text().count(self.old) if path.is_file() else 0
        if found != 1:
            return f"{self.name}: {self.file} has its old text {found} times"
        return None if test.is_file() else f"{self.name}: there is no {test.relative_to(ROOT)}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of the tests of a mutant."""

    mutant: Mutant
    verdict: str
    """`caught`, with how if not by a failing test; `SURVIVED`; or `NOT RUN` with the reason."""
    seconds: float
    output: str
    """Of pytest."""

    @property
    def caught(self) -> bool:
        return self.verdict.startswith("caught")


def read_table[T: Mutant](table: Path = TABLE, kind: type[T] = Mutant) -> list[T]:
    """All mutants, in the order of the table. Exits where one is out of date: it must follow the code."""
    entries = tomllib.loads(table.read_text())
    mutants = [kind(name=name, **fields) for name, fields in entries.items()]
    faults = [fault for mutant in mutants if (fault := mutant.fault()) is not None]
    if faults:
        sys.exit("\n".join([f"{table.name} is out of date:", *faults]))
    return mutants


def copy_tree(to: Path) -> None:
    """The files that git knows or would take, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def run_tests(tree: Path, cache: Path, tests: Sequence[str]) -> tuple[int | None, str, float]:
    """Exit code (none: out of time), output and seconds of pytest in `tree`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-o", f"cache_dir={cache}"]
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, *tests], cwd=tree, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        output, code = process.communicate(timeout=LIMIT_S)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, code = process.communicate()[0], None
    return code, output, time.monotonic() - begun


def try_mutant(mutant: Mutant, tree: Path, cache: Path) -> Result:
    """Break the copy, run the tests that should notice, and mend it."""
    path = tree / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.old, mutant.new))
    try:
        code, output, seconds = run_tests(tree, cache, shlex.split(mutant.tests))
    finally:
        path.write_text(sound)
    if code == FAILED:
        verdict = "caught"
    elif code == PASSED:
        verdict = "SURVIVED"
    elif code is None:
        verdict = f"caught (hang: ended after {LIMIT_S:.0f} s)"
    elif code < 0:
        verdict = f"caught (the process died of signal {-code})"
    else:
        verdict = f"NOT RUN (pytest exited {code}: {' '.join(output.split()[-12:])})"
    return Result(mutant, verdict, seconds, output)


def check_sound(mutants: Sequence[Mutant], tree: Path, cache: Path) -> None:
    """Exit unless all tests of these mutants pass on an unchanged copy; what they compile is kept for later."""
    chosen: dict[str, set[str]] = {}
    for mutant in mutants:
        file, *rest = shlex.split(mutant.tests)
        chosen.setdefault(file, set()).add(f"({rest[1]})" if rest else "")
    for file, names in chosen.items():
        some = [] if "" in names else ["-k", " or ".join(sorted(names))]
        code, output, seconds = run_tests(tree, cache, [file, *some])
        print(f"sound: {file} in {seconds:.0f} s", flush=True)
        if code != PASSED:
            sys.exit(f"{file} does not pass on the unchanged code:\n{output}")


def to_markdown(results: Sequence[Result]) -> str:
    """Return the table of the results, under a line that counts them."""
    caught = sum(result.caught for result in results)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines = [
        f"{caught} of {len(results)} caught; {date.today()}, commit {commit}, "
        f"{sum(result.seconds for result in results):.0f} s of tests.",
        "",
        "| mutant | the bug | file | tests that should notice | result | s |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        mutant = result.mutant
        cells = [
            f"`{mutant.name}`",
            mutant.idea,
            f"`{mutant.file.removeprefix('ultrascale_jax/')}`",
        ]
        tests = mutant.tests.removeprefix("tests/").replace("|", "\\|")
        cells += [f"`{tests}`", result.verdict, f"{result.seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--workers", type=int, default=1, help="mutants at once")
    parser.add_argument("--trust", action="store_true", help="do not run the unchanged code first")
    parser.add_argument("--out", type=Path, help="write the table of results to this file")
    options = parser.parse_args()
    mutants = read_table()
    if options.only:
        unknown = set(options.only) - {mutant.name for mutant in mutants}
        if unknown:
            sys.exit(f"--only: no such mutants: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        cache, trees = Path(folder) / "cache", queue.Queue()
        for number in range(options.workers):
            copy_tree(tree := Path(folder) / f"tree{number}")
            trees.put(tree)
        if not options.trust:
            check_sound(mutants, tree, cache)

        def attempt(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                result = try_mutant(mutant, tree, cache)
            finally:
                trees.put(tree)
            print(f"{result.seconds:5.0f} s  {mutant.name}: {result.verdict}", flush=True)
            return result

        with ThreadPoolExecutor(options.workers) as pool:
            results = list(pool.map(attempt, mutants))
    table = to_markdown(results)
    print("\n" + table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(table)
    return 0 if all(result.caught for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
