"""Set-up chooses a Python that really runs and is new enough, and does no work twice."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIND_PYTHON = ROOT / ".ci" / "find_python.sh"
GOOD = f'exec {sys.executable} "$@"\n'


def version(*number: int) -> str:
    """Return a script that runs as a Python of another version would: the script asks for `sys.version_info` alone."""
    setting = f"import sys; sys.version_info = {number}; exec(sys.argv.pop(1))"
    return f"exec {sys.executable} -c '{setting}' \"$2\"\n"


OLDER = version(3, 11, 7)
SHIM = 'echo "pyenv: command not found" >&2; exit 127\n'


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing but the shell's own tools on its path: `machine(name=script, ...)`."""
    (tmp_path / "tools").mkdir()
    for tool in ("bash", "env", "sort", "tail", "cut"):
        os.symlink(shutil.which(tool), tmp_path / "tools" / tool)

    def put(**pythons: str) -> None:
        for name, script in pythons.items():
            write(tmp_path / "bin" / name.replace("_", "."), script)

    return put


def write(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def found(tmp_path: Path, **environ: str) -> tuple[int, str]:
    """Return the exit code of the script, and the path or the one line of error that it prints."""
    path = f"{tmp_path / 'bin'}:{tmp_path / 'tools'}"
    environ = {"PATH": path, "HOME": str(tmp_path / "home"), **environ}
    done = subprocess.run([FIND_PYTHON], env=environ, capture_output=True, text=True)
    assert (done.stdout + done.stderr).count("\n") == 1
    return done.returncode, (done.stdout or done.stderr).strip()


def test_the_newest_name_on_the_path_is_taken_but_a_given_one_comes_first(machine, tmp_path):
    machine(python3=GOOD, python3_12=GOOD, python3_13=GOOD, mine=GOOD)
    assert found(tmp_path) == (0, f"{tmp_path}/bin/python3.13")
    for name in ("mine", f"{tmp_path}/bin/mine"):
        assert found(tmp_path, PYTHON=name) == (0, f"{tmp_path}/bin/mine")


@pytest.mark.parametrize("script", [OLDER, SHIM])
def test_a_given_python_that_will_not_do_is_refused_and_so_is_a_machine_without_one(
    machine, tmp_path, script
):
    machine(python3_13=GOOD, mine=script)
    code, error = found(tmp_path, PYTHON="mine")
    assert code == 2 and error.startswith("error: PYTHON=mine ")
    (tmp_path / "bin/python3.13").unlink()
    code, error = found(tmp_path)
    assert code == 2 and "install one" in error


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose `.venv` is installed, as far as make can tell."""
    root = tmp_path / "checkout"
    (root / ".venv").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for name in ("pyvenv.cfg", ".installed", ".installed-dev"):
        (root / ".venv" / name).touch()
    return root


def make(root: Path, *words: str) -> str:
    # Not the variables of the `make test` that may have started this test.
    environ = {"PATH": os.environ["PATH"]}
    words = ("make", "--dry-run", "GPU=", *words)
    done = subprocess.run(words, cwd=root, env=environ, capture_output=True, text=True, check=True)
    return done.stdout


def test_every_target_runs_what_there_is_in_the_environment_and_passes_args_on(checkout):
    for target in ("train", "test", "test-fast", "test-nightly", "soak", "bench"):
        commands = make(checkout, target, "ARGS=debug --fake-devices 8").splitlines()
        words = shlex.split(" ".join(commands))
        assert words[:3] == ["JAX_PLATFORMS=cpu", ".venv/bin/python", "-m"], target
        assert " ".join(commands).count(" debug --fake-devices 8") == len(commands), target
        for module in (words[i + 2] for i, word in enumerate(words) if word == ".venv/bin/python"):
            assert importlib.util.find_spec(module), (target, module)
        places = [word for word in words if word.split("/")[0] == "tests"]
        assert bool(places) == (target in ("test-fast", "test-nightly"))
        assert all((ROOT / place).exists() for place in places), target


def test_plain_pytest_runs_the_tests_of_every_day():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").iterdir()
        if any(path.rglob("test_*.py"))
    }
    assert folders == {*settings["testpaths"], "tests/nightly"}
