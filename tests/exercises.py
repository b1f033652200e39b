"""Exercises of the course, parts of the trainer to write: `python -m tests.exercises write|try CHAPTER`.

    write   copy the file into the folder `exercises`, with a hole for you to fill
    try     run the test of the exercise with your copy in place of the trainer's file: red, or green

A row of `exercises.toml` is a mutant with the name of a chapter. Its new text is the hole, with the task in a comment.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import PASSED, ROOT, Mutant, copy_tree, read_table, run_tests
from ultrascale_jax.cli.command_line import user_errors
from ultrascale_jax.config import require

TABLE = ROOT / "tests" / "exercises.toml"
FOLDER = ROOT / "exercises"
"""The readers' files, a folder for each chapter; git does not know them."""
MOST_LINES, MOST_COLUMNS = 12, 120
"""The part of pytest's complaint that is shown."""


@dataclass(frozen=True, kw_only=True)
class Exercise(Mutant):
    """A mutant whose name is that of a chapter, and whose `idea` says what the hole does."""

    sees: str
    """Text of pytest's complaint about the hole, as the chapter quotes it."""

    @property
    def path(self) -> Path:
        """The reader's copy of the file."""
        return FOLDER / self.name / Path(self.file).name


def exercises() -> dict[str, Exercise]:
    """Return the exercises by chapter. Exits where one is out of date."""
    return {exercise.name: exercise for exercise in read_table(TABLE, Exercise)}


def write(exercise: Exercise) -> str:
    """Write the copy with its hole, and return its path. `UserError` if it is there."""
    fix = "holds your work; remove it to begin anew"
    require(not exercise.path.exists(), "exercise", str(exercise.path), fix)
    exercise.path.parent.mkdir(parents=True, exist_ok=True)
    sound = (ROOT / exercise.file).read_text()
    exercise.path.write_text(sound.replace(exercise.old, exercise.new))
    return os.path.relpath(exercise.path)


def attempt(exercise: Exercise) -> tuple[bool, str]:
    """Run the tests with the reader's copy in place of the trainer's file; return whether all pass, and the words."""
    fix = f"is not there; run `python -m tests.exercises write {exercise.name}`"
    require(exercise.path.exists(), "exercise", str(exercise.path), fix)
    with tempfile.TemporaryDirectory(prefix="exercise-") as folder:
        copy_tree(tree := Path(folder) / "tree")
        (tree / exercise.file).write_text(exercise.path.read_text())
        code, output, _ = run_tests(tree, Path(folder) / "cache", shlex.split(exercise.tests))
    if code == PASSED:
        return True, output.strip().splitlines()[-1]
    complaint = re.findall(r"^E .*", output, re.MULTILINE) or output.splitlines()
    return False, "\n".join(line[:MOST_COLUMNS] for line in complaint[:MOST_LINES])


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.exercises", description=__doc__, formatter_class=form
    )
    parser.add_argument("action", choices=("write", "try"))
    parser.add_argument("chapter", metavar="CHAPTER", choices=exercises(), help="as 01_memory")
    options = parser.parse_args(argv)
    exercise = exercises()[options.chapter]
    with user_errors():
        if options.action == "write":
            print(f"write the part marked `Exercise` of {write(exercise)}")
            return 0
        green, words = attempt(exercise)
    print(f"green: {words}" if green else f"red\n{words}")
    return not green


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
