"""Search for the best mesh on behalf of the planner's page: `ultrascale plan search --compile 0`, in its own process.

The search of many GPUs takes a minute; a process of its own can be ended, and leaves the page quick.
"""

import json
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from ultrascale_jax.cli.plan_commands import words
from ultrascale_jax.cli.plan_commands.words import machine_words, parse_choices
from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.web.answers import answered
from ultrascale_jax.web.fields import Asked, Bases, rest_of, text_of


class Suggestions:
    """At most one search at a time; another question ends the one before."""

    def __init__(self, bases: Bases):
        self.bases = bases
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @answered
    def suggest(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /suggest: the best meshes for a state, when they are found; `keep` pins fields as `--fixed` does."""
        state = dict(query)
        keep = state.pop("keep", "").strip()
        fixed = ["--fixed", keep] if keep and parse_choices("keep", keep) else []
        return self._search(search_words(self.bases.ask(state)) + fixed)

    def end(self) -> None:
        """End the search that runs, if one does."""
        if self._process is not None:
            self._process.kill()

    def _search(self, command: list[str]) -> dict[str, Any]:
        with self._lock:
            self.end()
            self._process = process = words.start("search", command)
        output, errors = process.communicate()
        if not output:
            code = process.returncode
            problem = words.last_error(errors, code) if code > 0 else "the search was stopped"
            raise UserError(problem.replace("fixed=", "keep=", 1))
        result = json.loads(output)
        rows = [row | {"state": state_of_row(row)} for row in result["rows"]]
        return {"rows": rows, "answer": result["answer"], "counts": result["counts"]}


def search_words(request: Asked) -> list[str]:
    """Return the arguments of `plan search` for a request, with every field open that a search chooses."""
    machine = machine_words(request.options)
    open_words = words.search_words(request.options.recipe, request.cfg)
    return [*open_words, *machine, "--compile", "0", "--top", "8"]


def state_of_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the state that shows a row of the search; one axis has size -1, so that another can be changed."""
    chosen = dict(row["chosen"])
    sizes = {axis: chosen[f"mesh.{axis}"] for axis in MeshConfig().sizes}
    chosen[f"mesh.{rest_of(sizes)}"] = -1
    return {name: text_of(name, value) for name, value in chosen.items()}
