"""Take the pictures of `docs/pictures` with Chromium: `python -m scripts.screenshots [site] [watch] [planner]`.

`site` needs the site in build/site (`make docs`); `watch` trains two small runs in build/screenshots, or takes those
that are there from the last time; `planner` starts the planner's page. A picture is a PNG of 256 colours, so that
the repository stays small.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ultrascale_jax.cli import command_line
from ultrascale_jax.config import require

ROOT = Path(__file__).parent.parent
PICTURES, WORK = ROOT / "docs/pictures", ROOT / "build/screenshots"
WIDTH = 1400
COLOURS = 256

RATES = ("1e-3", "3e-3")
"""Learning rates of the runs on the live page."""

TRAINING = "moe_debug --fake-devices 2 --train.steps 200 --train.eval-every 20"


def take(url: str, name: str, height: int, width: int = WIDTH) -> None:
    """Write `docs/pictures/NAME.png`: the first `height` pixels of a page, after ten seconds of its own time."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    require(browser is not None, "chromium", None, "is not on the path: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.png"
        options = (
            "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=10000"
        )
        size = [f"--window-size={width},{height}", f"--screenshot={file}"]
        command = [browser or "", *options.split(), *size, url]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        picture = Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        picture.save(PICTURES / f"{name}.png", optimize=True)
    size = (PICTURES / f"{name}.png").stat().st_size
    print(f"docs/pictures/{name}.png: {width} x {height}, {size / 1024:.0f} KiB")


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command on the CPU, in build/screenshots, where paths are as short as a user's."""
    WORK.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ultrascale_jax", *words]
    return subprocess.Popen(command, cwd=WORK, env=environ, text=True, **options)


def ultrascale(*words: str) -> None:
    """Run a command to its end, which must be a good one."""
    code = start(*words).wait()
    require(code == 0, "command", " ".join(words), f"ended with {code}; see above")


def site() -> None:
    """Take the first page of the site."""
    index = ROOT / "build/site/index.html"
    require(index.is_file(), "site", str(index), "is not there: make docs")
    take(index.as_uri(), "site", 1000)


def watch() -> None:
    """Take the live page with two runs."""
    for rate in RATES:
        if not (WORK / f"out/lr_{rate}/checkpoints/100").exists():
            ultrascale(
                "train", *TRAINING.split(), "--optim.lr", rate, "--log.run-dir", f"out/lr_{rate}"
            )
    serve("watch", "out", name="watch", height=1300)


def planner() -> None:
    """Take the planner's page for Llama 3 70B on 512 H100s."""
    serve("plan", "serve", "llama3_70b", "--gpus", "512", name="planner", height=1090)


def serve(*words: str, name: str, height: int) -> None:
    """Take the page of which a command prints the address."""
    with start(*words, stdout=subprocess.PIPE) as server:
        try:
            address = server.stdout.readline() if server.stdout else ""
            take(address.split()[-1], name, height)
        finally:
            server.terminate()


TAKES = {"site": site, "watch": watch, "planner": planner}


def main(names: Sequence[str]) -> None:
    with command_line.user_errors():
        for name in names:
            require(name in TAKES, "name", name, f"choose some of {', '.join(TAKES)}")
        for name in names or TAKES:
            TAKES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
