"""Completion for a shell: the script that tyro makes of all commands, and what bash completes by it."""

import shutil
import subprocess
import sys

import pytest

from ultrascale_jax.cli import main as command


def script(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["ultrascale", "--completion", *words])
    with pytest.raises(SystemExit) as stop:
        command.main()
    captured = capsys.readouterr()
    return captured.err if stop.value.code else captured.out


def completed(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    line = " ".join(words)
    ask = f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _tyro_ultrascale\n"
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash"], input=script + ask, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_verbs_options_and_values(monkeypatch, capsys):
    made = script(monkeypatch, capsys, "bash")
    assert completed(made, "ultrascale", "insp") == ["inspect"]
    assert completed(made, "ultrascale", "plan", "mem") == ["memory"]
    assert completed(made, "ultrascale", "train", "debug", "--train.st") == ["--train.steps"]
    assert "--max-shard-gb" in completed(made, "ultrascale", "convert-hf", "--max")
    assert "fp8" in completed(made, "ultrascale", "train", "--train.precision", "f")


def test_zsh_gets_a_script_and_another_shell_an_error(monkeypatch, capsys):
    made = script(monkeypatch, capsys, "zsh")
    assert made.startswith("#compdef ultrascale") and "--train.steps" in made
    error = script(monkeypatch, capsys, "fish")
    assert error == "error: completion='fish': choose bash or zsh\n"
