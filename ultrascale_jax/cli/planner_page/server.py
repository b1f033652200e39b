"""Serve the planner's page, by the server of `dashboard/local_server.py`.

/          the page (`page.html`, `page.css`, `page.js`)
/plan      memory, time, mesh and command lines of a state (`fields.py`)
/sweep     memory and time over a field
/suggest   the search for the best mesh, begun or under way; /cancel ends it
"""

import dataclasses
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ultrascale_jax.cli.planner_page.answers import SWEEPS, Answers
from ultrascale_jax.cli.planner_page.fields import SECTIONS, Bases, state_of
from ultrascale_jax.cli.planner_page.programs import Program
from ultrascale_jax.cli.planner_page.suggestions import Suggestions
from ultrascale_jax.dashboard.local_server import LocalServer, fill
from ultrascale_jax.plan.workload import Run


def page(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page with its settings, and its content security policy."""
    folder = files("ultrascale_jax.cli.planner_page")
    text, style, script = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    return fill(text.replace("STYLE", style).replace("SCRIPT", script), settings)


def settings(bases: Bases) -> dict[str, Any]:
    """Return what the page must know before it asks: its fields, and the state that it begins with."""
    return {
        "recipes": bases.recipes,
        "sections": [dataclasses.asdict(section) for section in SECTIONS],
        "sweeps": SWEEPS,
        "start": start(bases),
    }


def start(bases: Bases) -> dict[str, str]:
    """Return the state of the command line: its recipe, machine, and where they differ from the recipe's, fields."""
    asked = bases.ask({})
    own = state_of(bases.default)
    changed = {name: text for name, text in state_of(bases.cfg).items() if text != own[name]}
    machine = {name: asked.state[name] for name in ("recipe", "gpus", "gpu", "cluster")}
    return {name: text for name, text in machine.items() if text} | changed


class PlannerServer(LocalServer):
    """The server of the planner's page."""

    def __init__(
        self,
        bases: Bases,
        programs: Mapping[tuple[Run, str], Program],
        host: str,
        port: int,
        token: str | None = None,
    ):
        own = settings(bases)
        answers, self._suggestions = Answers(bases, programs), Suggestions(bases)
        routes = {
            "/plan": answers.plan,
            "/sweep": answers.sweep,
            "/suggest": self._suggestions.suggest,
            "/cancel": self._suggestions.cancel,
        }
        super().__init__(host, port, lambda token: page(own | {"token": token}), routes, token)

    def server_close(self) -> None:
        """Close the port, and end a search that runs."""
        self._suggestions.cancel({})
        super().server_close()
