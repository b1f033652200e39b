"""The command `ultrascale`: what it can run, and what the end of a command tells the shell."""

import os
import subprocess
import sys

import pytest

import ultrascale_jax
from ultrascale_jax.cli import main as command
from ultrascale_jax.cli import plan


def ended(monkeypatch, *words: str) -> object:
    """The exit code of `ultrascale WORDS`, None where `main` returns."""
    monkeypatch.setattr(sys, "argv", ["ultrascale", *words])
    try:
        command.main()
    except SystemExit as stop:
        return stop.code
    return None


def test_every_command_is_listed_and_has_its_own_help(monkeypatch, capsys):
    assert ended(monkeypatch) is None
    listed = capsys.readouterr().out
    names = [line.split()[0] for line in listed.splitlines()[2:] if line]
    assert names == list(command.COMMANDS)
    for name in names:
        # `convert-hf` has no options of its own: its help lists what comes next, and wants it.
        assert ended(monkeypatch, name, "--help") in (None, 0, 2), name
        assert f"ultrascale {name}" in capsys.readouterr().out, name


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert ended(monkeypatch, "--version") is None
    assert capsys.readouterr().out == f"{ultrascale_jax.__version__}\n"


def test_an_unknown_command_is_one_line_that_names_the_others(monkeypatch, capsys):
    assert ended(monkeypatch, "trian") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: command='trian': choose one of train, launch, ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted\n"), (RuntimeError("broken"), 70, "broken\n")],
)
def test_what_ends_a_command_is_an_exit_code(error, code, said, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(plan, "main", fail)
    assert ended(monkeypatch, "plan", "memory") == code
    assert capsys.readouterr().err.endswith(said)


WAKES_JAX = """
from ultrascale_jax.cli import main, plan

def wake(arguments):
    import jax
    print(len(jax.devices()))

plan.main = wake
main.run("plan", [])
"""


@pytest.mark.slow
def test_a_command_that_wakes_jax_starts_without_a_word():
    environ = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", WAKES_JAX], env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and int(done.stdout) >= 1


def test_a_host_without_a_gpu_starts_on_the_cpu_unless_somebody_says_otherwise(tmp_path):
    def chosen(environ, *devices):
        command.choose_platform(environ, devices)
        return environ.get("JAX_PLATFORMS")

    (tmp_path / "nvidiactl").touch()
    absent, present = tmp_path / "nvidia0", tmp_path / "nvidiactl"
    assert chosen({}, absent) == "cpu"
    assert chosen({}, absent, present) is None
    assert chosen({"JAX_PLATFORMS": "cuda"}, absent) == "cuda"
    assert chosen({"JAX_PLATFORMS": ""}, absent) == ""
    # Then the run says that the GPU is not there.
    assert chosen({"SLURM_GPUS_ON_NODE": "8"}, absent) is None


def test_a_closed_stdout_does_not_replace_the_exit_code():
    code = (
        "import sys\n"
        "from ultrascale_jax.cli import main, plan\n"
        "def end(arguments):\n"
        "    print('words')\n"
        "    raise SystemExit(2) if sys.argv[1] == 'exit' else ValueError('broken')\n"
        "plan.main = end\n"
        "main.run('plan', [])"
    )
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    for how, expected, said in (("exit", 2, b""), ("raise", 70, b"ValueError: broken\n")):
        process = subprocess.Popen(
            [sys.executable, "-c", code, how],
            env=buffered,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        assert process.wait() == expected
        assert error.endswith(said)


def test_a_command_of_a_checkout_is_named_by_its_error(monkeypatch, capsys):
    assert ended(monkeypatch, "plan", "validate", "RUNS.csv") == 2
    assert "python -m scripts.plan validate RUNS.csv" in capsys.readouterr().err
