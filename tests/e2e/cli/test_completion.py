"""Completion for a shell: the script that tyro makes of all commands, and what bash completes by it."""

import shutil
import subprocess

import pytest

from tests.commands import ultrascale


def script(capsys, shell: str) -> str:
    assert ultrascale("--completion", shell) in (None, 0)
    return capsys.readouterr().out


def completed(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    line = " ".join(words)
    ask = f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _tyro_ultrascale\n"
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash"], input=script + ask, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_verbs_recipes_options_and_values(capsys):
    made = script(capsys, "bash")
    assert completed(made, "ultrascale", "insp") == ["inspect"]
    assert completed(made, "ultrascale", "plan", "mem") == ["memory"]
    assert completed(made, "ultrascale", "train", "llama3_70") == ["llama3_70b"]
    assert completed(made, "ultrascale", "plan", "memory", "gpt_o") == ["gpt_oss_20b"]
    assert "auto: what `plan search` recommends" in made, "a text of several lines is one line"
    assert completed(made, "ultrascale", "train", "debug", "--train.st") == ["--train.steps"]
    options = completed(made, "ultrascale", "train", "debug", "--")
    assert options and all(option.startswith("--") for option in options)
    assert "--max-shard-gib" in completed(made, "ultrascale", "convert-hf", "--max")
    assert "fp8" in completed(made, "ultrascale", "train", "--train.precision", "f")
