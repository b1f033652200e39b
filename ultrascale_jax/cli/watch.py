"""Watch runs on a page of the browser, live or finished: `ultrascale watch RUN_DIR...`.

The page has loss, learning rate, gradient norm, speed, memory, experts' loads and every other field of
`metrics.jsonl`, goodput by class, and events; several runs are drawn into the same charts. It loads nothing from the
network. Only this machine can open it, with the token of the address that is printed; `--host` opens it to others.

    ultrascale watch out/demo
    ultrascale watch out/a out/b --export out/runs.html
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import require
from ultrascale_jax.dashboard.server import Dashboard, WatchedRun, page, snapshot
from ultrascale_jax.launch.events import FILE_NAME
from ultrascale_jax.launch.run_files import METRICS, write_atomic


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale watch`."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, or a folder of some."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 0
    """Port to listen on; 0 is any that is free."""
    export: Path | None = None
    """Write one HTML file that needs no server, and end."""


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale watch"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        runs = find_runs(options.run_dirs)
        if options.export is not None:
            export(runs, options.export)
            return
        server = Dashboard(runs, options.host, options.port)
    with server:
        print(f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {server.url}", flush=True)
        server.serve_forever()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among `paths`, and in those that are none themselves."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if _is_run(path) else sorted(filter(_is_run, path.glob("*")))
        fix = f"holds no {METRICS} or {FILE_NAME}; give the run directory of a training run"
        require(bool(inside), "run_dirs", str(path), fix)
        found += inside
    require(bool(found), "run_dirs", "", "give a run directory")
    return found


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, FILE_NAME))


def export(runs: Sequence[Path], file: Path) -> None:
    """Write the page with all data inside it."""
    text, _ = page(data=snapshot([WatchedRun(path) for path in runs]))
    print(output.write_file("export", file, lambda path: write_atomic(path, text.encode())))
