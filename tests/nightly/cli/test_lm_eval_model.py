"""The names of tasks that the harness itself has: it reads thousands of files."""

from tests.commands import refused
from tests.paths import HF


def test_a_task_that_the_harness_lacks_is_told(capsys):
    said = refused(
        capsys, "evaluate", HF / "llama3", "--tokenizer", "bytes", "--tasks", "x,arc_easy"
    )
    assert "tasks='x,arc_easy': lm-evaluation-harness has no x; give" in said
