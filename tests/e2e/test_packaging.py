"""The wheel as an installer sees it, and the public API."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ultrascale_jax

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path, **environ: str) -> str:
    words, own = [str(word) for word in command], os.environ | environ
    done = subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(target: str, cwd: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=cwd)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder / "archive")) as archive:
        archive.extractall(folder, filter="data")
    (path,) = folder.glob("ultrascale_jax-*")
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built as `python -m build` does: from the source archive."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


def test_the_source_archive_holds_what_its_tests_read(sdist):
    def files(root: Path, *folders: str) -> set[str]:
        found = {path for folder in folders for path in root.joinpath(folder).rglob("*")}
        found |= {root / "Makefile", root / "pyproject.toml", *root.glob("*.md")}
        files = {path.relative_to(root).as_posix() for path in found if path.is_file()}
        return {file for file in files if "__pycache__" not in file}

    folders = ("ultrascale_jax", "kernels", "configs", "scripts", "tests", "docs", ".ci")
    links = ("ultrascale_jax/kernels", "ultrascale_jax/configs")
    assert files(ROOT, *folders, *links) - files(sdist, *folders, *links) == set()


def test_the_wheel_holds_the_library_with_its_kernels_and_recipes_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"ultrascale_jax"}
    kernels = {f"ultrascale_jax/{path.relative_to(ROOT)}" for path in ROOT.glob("kernels/*.py")}
    recipes = {f"ultrascale_jax/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*.py")}
    assert kernels and recipes and set(names) >= kernels | recipes
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("ultrascale_jax/web/static/*")}
    assert pages and set(names) >= pages | {"ultrascale_jax/py.typed"}
    assert len(names) == len(set(names))


def test_the_wheel_imports_in_an_environment_that_has_nothing_else(wheel, tmp_path):
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=tmp_path)
    code = (
        "import ultrascale_jax as u; "
        "print(u.__file__, u.__version__, u.Config().mesh.resolve(8).fsdp)"
    )
    file, version, fsdp = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert (version, fsdp) == (ultrascale_jax.__version__, "8")

    # The command is there, with its recipes; what it is made of comes from this environment.
    (site,) = {path for path in sys.path if path.endswith("site-packages")}
    paths = f"{Path(file).parents[1]}{os.pathsep}{site}"
    command = [
        tmp_path / "venv/bin/ultrascale",
        "train",
        "debug",
        "--mesh",
        "fsdp=8",
        "--print-config",
    ]
    printed = run(*command, cwd=tmp_path, PYTHONPATH=paths)
    assert json.loads(printed)["mesh"]["fsdp"] == 8


def test_transformers_does_not_take_the_folder_of_kernels_for_a_package():
    # `from_pretrained` asks this first, and failed where the folder was a package that raised.
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert run(sys.executable, "-c", code, cwd=ROOT) == "False"
