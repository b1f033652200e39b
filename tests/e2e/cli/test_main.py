"""The command `ultrascale`: what it can run, and what the end of a command tells the shell."""

import os
import shutil
import subprocess
import sys

import pytest

import ultrascale_jax
from tests.commands import refused, ultrascale
from ultrascale_jax.cli import main, plan


def test_every_command_is_listed_and_has_its_own_help(capsys):
    assert ultrascale() is None
    listed = capsys.readouterr().out
    names = [line.split()[0] for line in listed.splitlines()[3:] if line]
    assert names == list(main.COMMANDS)
    for name in names:
        assert ultrascale(name, "--help") in (None, 0), name
        said = capsys.readouterr().out
        assert f"ultrascale {name}" in said, name
        for words in ("llama3_8b", "--mesh AXIS=SIZE", "Peak learning") if name == "train" else ():
            assert words in said


def test_the_version_is_that_of_the_package_and_an_unknown_command_is_one_line(capsys):
    assert ultrascale("--version") is None
    assert capsys.readouterr().out == f"{ultrascale_jax.__version__}\n"
    said = refused(capsys, "trian")
    assert said.startswith("command='trian': did you mean train? choose one of train, launch, ")
    said = refused(capsys, "plan", "memroy")
    assert said.startswith("verb='memroy': did you mean memory? choose one of memory, search, ")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted\n"), (RuntimeError("broken"), 70, "broken\n")],
)
def test_what_ends_a_command_is_an_exit_code(error, code, said, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(plan, "main", fail)
    assert ultrascale("plan", "memory") == code
    assert capsys.readouterr().err.endswith(said)


COMPLETED = {
    "ultrascale insp": "inspect",
    "ultrascale plan mem": "memory",
    "ultrascale train llama3_70": "llama3_70b",
    "ultrascale plan memory gpt_o": "gpt_oss_20b",
    "ultrascale train debug --train.st": "--train.steps",
    "ultrascale convert-hf --max": "--max-shard-gib",
    "ultrascale train --train.precision f": "fp8",
}
"""Line to a completion that bash offers for its last word."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_verbs_recipes_options_and_values(capsys):
    assert ultrascale("--completion", "bash") in (None, 0)
    script = capsys.readouterr().out
    assert "auto: what `plan search` recommends" in script, "a text of several lines is one line"
    for line in COMPLETED:
        last = len(line.split()) - 1
        script += f"\nCOMP_WORDS=({line}); COMP_CWORD={last}; _tyro_ultrascale"
        script += '\necho "${COMPREPLY[*]}"'
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    for (line, word), offered in zip(COMPLETED.items(), done.stdout.splitlines(), strict=True):
        assert word in offered.split(), line


def test_a_host_without_a_gpu_starts_on_the_cpu_unless_somebody_says_otherwise(tmp_path):
    def chosen(environ, *devices):
        main.choose_platform(environ, devices)
        return environ.get("JAX_PLATFORMS")

    (tmp_path / "nvidiactl").touch()
    absent, present = tmp_path / "nvidia0", tmp_path / "nvidiactl"
    assert chosen({}, absent) == "cpu"
    assert chosen({}, absent, present) is None
    assert chosen({"JAX_PLATFORMS": "cuda"}, absent) == "cuda"
    assert chosen({"JAX_PLATFORMS": ""}, absent) == ""
    # Then the run says that the GPU is not there.
    assert chosen({"SLURM_GPUS_ON_NODE": "8"}, absent) is None


def command_of(body: str, call: str = "main.run('plan', [])") -> list[str]:
    """The command line of a process that calls `ultrascale plan`, or another, whose main function has this body."""
    code = "import os, sys; from ultrascale_jax.cli import main, plan, train\ndef end(arguments):\n"
    code += f"    {body}\nplan.main = train.main = end\n{call}"
    return [sys.executable, "-c", code]


def test_a_command_that_wakes_jax_starts_without_a_word():
    environ = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    words = command_of("import jax; print(len(jax.devices()))")
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and int(done.stdout) >= 1


@pytest.mark.parametrize(
    ("body", "call", "code", "said"),
    [
        # A closed stdout does not replace the exit code, nor end a run.
        ("print('words'); raise SystemExit(2)", "main.run('plan', [])", 2, b""),
        ("print('words'); raise ValueError(3)", "main.run('plan', [])", 70, b"ValueError: 3\n"),
        ("print('words')", "main.main()", 141, b""),
        ("print('words')", "main.run('train', [])", 0, b""),
    ],
)
def test_help_ends_with_its_reader_and_a_run_does_not(body, call, code, said):
    process = subprocess.Popen(
        command_of(body, call),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read().endswith(said) if said else errors.read() == b""
    assert process.wait(timeout=300) == code
