"""Plan on a page of the browser: `ultrascale plan serve`.

Pick a model, GPUs, mesh, recomputation, precision and batch, and see memory, time and the mesh's map change at once, by
the formulas of `plan memory` and `plan search`; beside them what XLA compiled, where that is known. The page loads
nothing from the network. Only this machine can open it, with the token of the address that is printed; `--host` opens
it to others.

    ultrascale plan serve llama3_70b --gpus 512
    ultrascale plan serve llama3_8b --gpus 8 --compiled out/plan --port 8800
    ultrascale plan serve llama3_8b --gpus 64 --export out/planner.html
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import recipe_of
from ultrascale_jax.cli.planner_page.answers import Answers
from ultrascale_jax.cli.planner_page.export import table
from ultrascale_jax.cli.planner_page.fields import MACHINE, Bases
from ultrascale_jax.cli.planner_page.programs import known_programs
from ultrascale_jax.cli.planner_page.server import PlannerServer, page, settings
from ultrascale_jax.launch.run_files import write_atomic


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of `ultrascale plan serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 0
    """Port to listen on; 0 is any that is free."""
    token: Annotated[str | None, command_line.option("WORD", "a new one")] = None
    """Secret of the page's address, for an address that stays the same."""
    compiled: Annotated[tuple[Path, ...], command_line.option("DIR...")] = ()
    """Folders that `plan compile --dump` wrote: what XLA made of a run is shown beside the formulas."""
    export: Annotated[Path | None, command_line.option("FILE")] = None
    """Write one HTML file that needs no server, with a grid of configurations around the command line's, and end."""

    # The page has tables and figures.
    json: tyro.conf.Suppress[bool] = False
    figure: tyro.conf.Suppress[Path | None] = None


def main(argv: Sequence[str]) -> None:
    arguments = list(argv)
    cfg, options, cluster = common.parse(arguments, "serve", Options, __doc__)
    with command_line.user_errors():
        if options.mesh == "auto":
            chosen, why = common.choose_open(cfg, options, cluster)
            common.tell(why)
            cfg = dataclasses.replace(cfg, mesh=chosen.mesh)
        bases = Bases(recipe=recipe_of(arguments), cfg=cfg, options=options)
        programs = known_programs(options.compiled)
        if options.export is not None:
            export(Answers(bases, programs), options.export)
            return
        server = PlannerServer(bases, programs, options.host, options.port, options.token)
    with server:
        print(f"planner: {server.url}", flush=True)
        server.serve_forever()


def export(answers: Answers, file: Path) -> None:
    """Write the page with a grid of answers inside it."""
    with output.working("computing the page") as tell:
        grid = table(answers, lambda done, total: tell(f"by formula: {done:,} of {total:,}"))
    begin = {name: grid["fixed"][name] for name in ("recipe", *MACHINE)}
    text, _ = page(settings(answers.bases) | {"table": grid, "start": begin})
    print(output.write_file("export", file, lambda path: write_atomic(path, text.encode())))
