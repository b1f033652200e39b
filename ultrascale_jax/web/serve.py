"""Plan on a page of the browser: `ultrascale plan serve`.

Pick a model, GPUs, mesh, recomputation, precision and batch, and see memory, time and the mesh's map change at once, by
the formulas of `plan memory` and `plan search`. The page loads nothing from the network. Only this machine can open
it, by the address that is printed; `--host` opens it to others.

    ultrascale plan serve llama3_70b --gpus 512
    ultrascale plan serve llama3_8b --gpus 8 --port 8800
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.web.answers import Answers
from ultrascale_jax.web.fields import Bases
from ultrascale_jax.web.server import Server
from ultrascale_jax.web.suggestions import Suggestions


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of `ultrascale plan serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 0
    """Port to listen on; 0 is any that is free."""
    token: Annotated[str | None, command_line.option("WORD", "a new one")] = None
    """Secret of the printed address, for an address that stays the same."""

    # The page has tables and figures.
    json: tyro.conf.Suppress[bool] = False
    figure: tyro.conf.Suppress[Path | None] = None


def main(argv: Sequence[str]) -> None:
    cfg, options, cluster = common.parse(argv, "serve", Options, __doc__)
    with command_line.user_errors():
        if options.mesh == "auto":
            chosen = common.choose_open(cfg, options, cluster)
            cfg = dataclasses.replace(cfg, mesh=chosen.mesh)
        bases = Bases(cfg=cfg, options=options)
        answers, suggestions = Answers(bases), Suggestions(bases)
        routes = {
            **{"/form": answers.form, "/plan": answers.plan, "/sweep": answers.sweep},
            "/suggest": suggestions.suggest,
        }
        server = Server("planner.html", routes, options.host, options.port, options.token)
    try:
        server.serve("planner")
    finally:
        suggestions.end()
