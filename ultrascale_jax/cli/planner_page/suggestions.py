"""Search for the best mesh on behalf of the planner's page: `ultrascale plan search --compile 0`, in its own process.

The search of many GPUs takes a minute; a process of its own can be ended, and leaves the page quick.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.plan_commands.words import machine_words, parse_choices, words
from ultrascale_jax.cli.planner_page.answers import answered
from ultrascale_jax.cli.planner_page.fields import Asked, Bases, rest_of, text_of
from ultrascale_jax.config import Config, MeshConfig, UserError, with_changes

TOP = 8
"""Meshes that the page lists."""


class Suggestions:
    """At most one search at a time; another question ends the one before."""

    def __init__(self, bases: Bases):
        self.bases = bases
        self._lock = threading.Lock()
        self._search: _Search | None = None

    def suggest(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /suggest: begin the search for a state, or say how far it is; `keep` pins fields as `--fixed` does."""
        state = dict(query)
        keep = state.pop("keep", "").strip()

        def work() -> dict[str, Any]:
            if keep:
                parse_choices("keep", keep)
            command = search_words(self.bases.ask(state)) + (["--fixed", keep] if keep else [])
            with self._lock:
                if self._search is None or self._search.words != command:
                    self._end()
                    self._search = _Search(command)
                return self._search.answer()

        return answered(work)

    def cancel(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /cancel: end the search that runs."""
        with self._lock:
            self._end()
        return {}

    def _end(self) -> None:
        if self._search is not None:
            self._search.end()
        self._search = None


class _Search:
    """A search under way, and its result."""

    def __init__(self, command: list[str]):
        self.words, self.began = command, time.monotonic()
        self._result: dict[str, Any] | None = None
        self._out: IO[bytes] = tempfile.TemporaryFile()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        own = [sys.executable, "-m", "ultrascale_jax", "plan", "search"]
        self._process = subprocess.Popen(
            [*own, *command], stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._errors
        )

    def answer(self) -> dict[str, Any]:
        """Return the result, or since when the search runs."""
        if self._result is None:
            if self._process.poll() is None:
                return {"running_s": time.monotonic() - self.began}
            self._result = self._read()
        if "error" in self._result:
            raise UserError(self._result["error"])
        return self._result

    def _read(self) -> dict[str, Any]:
        self._out.seek(0)
        self._errors.seek(0)
        text, errors = self._out.read(), self._errors.read().decode(errors="replace")
        self.end()
        if not text:
            last = (errors.strip().splitlines() or ["the search ended without a word"])[-1]
            return {"error": last.removeprefix("error: ").replace("fixed=", "keep=", 1)}
        found = json.loads(text)
        rows = [row | {"state": state_of_row(row)} for row in found["rows"]]
        return {"rows": rows, "answer": found["answer"], "counts": found["counts"]}

    def end(self) -> None:
        """End the process, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._out.close()
        self._errors.close()


def search_words(asked: Asked) -> list[str]:
    """Return the words behind `plan search` that search for what is asked, with all free that a search chooses."""
    free = free_of(asked.cfg, command_line.load_recipe(asked.recipe))
    machine = machine_words(asked.options)
    return [*words(asked.recipe, free), *machine, "--compile", "0", "--top", str(TOP), "--json"]


def free_of(cfg: Config, recipe: Config) -> Config:
    """Return `cfg` with the recipe's values of what a search chooses."""
    own = {name: getattr(recipe.train, name) for name in ("zero", "remat", "microbatches")}
    return with_changes(cfg, mesh=recipe.mesh, pp=recipe.pp, **own)


def state_of_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the state that shows a row of the search; one axis takes the rest, so that another can be changed."""
    chosen = dict(row["chosen"])
    sizes = {axis: chosen[f"mesh.{axis}"] for axis in MeshConfig().sizes}
    chosen[f"mesh.{rest_of(sizes)}"] = -1
    return {name: text_of(name, value) for name, value in chosen.items()}
