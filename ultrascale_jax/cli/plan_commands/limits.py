"""Answer `plan memory --explain limits`: the fewest GPUs and the longest sequences that fit."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.cli import output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import train_command
from ultrascale_jax.config import AUTO, Config, UserError, with_changes
from ultrascale_jax.plan.auto import choices_of_mesh, choose_auto
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.report.limits import Limit, LimitsReport
from ultrascale_jax.plan.search import limits
from ultrascale_jax.plan.search.limits import Reach
from ultrascale_jax.plan.search.search_space import (
    Choices,
    named_choices,
    optimizer_options,
    with_moments_on_host,
)
from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run whose limits are requested."""

    requested: Config
    """As the command line says; it may leave fields open."""
    chosen: Config
    """The same with all fields chosen."""
    options: common.Options
    """They name the fields that stay."""
    cluster: Cluster
    resort: str = ""
    """Options of the optimizer that are named and not chosen."""

    def answer(self) -> LimitsReport:
        """Find the limits; stderr shows the progress."""
        with output.working("looking for the fewest GPUs") as tell:
            fewest, longest = self._fewest(tell), self._longest(tell)
            limits = [*fewest, *longest, *self._with_moments_on_host(fewest[-1], longest[-1], tell)]
        return LimitsReport(limits=limits)

    def _longest(self, tell: output.Tell) -> list[Limit]:
        """Return the longest sequences on this mesh and on any."""
        this_mesh, length = self._longest_on_this_mesh()
        return [this_mesh, self._longest_on_any_mesh(length, tell)]

    def _with_moments_on_host(
        self, fewest: Limit, longest: Limit, tell: output.Tell
    ) -> list[Limit]:
        """Return the limits with moments in the host's memory, where only they fit: on fewer GPUs, or at any length."""
        requested, chosen = map(with_moments_on_host, (self.requested, self.chosen))
        if requested is None or chosen is None:
            return []
        resort = optimizer_options(self.requested, requested)
        other = dataclasses.replace(self, requested=requested, chosen=chosen, resort=resort)
        fewer = other._fewest(tell)[-1:]
        lengths = [] if longest.step else other._longest(tell)
        most = fewest.step.run.num_gpus if fewest.step else float("inf")
        return [
            *(limit for limit in fewer if limit.step and limit.step.run.num_gpus < most),
            *(limit for limit in lengths if limit.step),
        ]

    def _named(self, num_gpus: int, *, mesh: bool) -> Choices:
        """Return the fields that the command line names as choices, with `--mesh` or without."""
        names = [name for name in self.options.named if mesh or name != "mesh"]
        return named_choices(self.requested, names, num_gpus)

    def _fewest(self, tell: output.Tell) -> list[Limit]:
        """Return the fewest GPUs that may fit, if they are fewer, and the fewest that fit for certain.

        A mesh that is named stays if it has an open axis.
        """
        is_open = "mesh" in self.options.named and -1 in self.requested.mesh.sizes.values()
        refused: list[UserError] = []

        def choices_of(count: int) -> Choices:
            if self.options.cluster is None:
                try:
                    find_cluster(None, self.options.gpu, count)
                except UserError as error:  # nothing tells the links of a GPU that is written out
                    refused.append(error)
                    raise
            return self._named(count, mesh=is_open)

        sure, unsure, most = limits.fewest_gpus(self.requested, self.cluster, choices_of, tell)
        question = f"fewest GPUs on {'this' if is_open else 'any'} mesh"
        tried = str(refused[0]) if refused else f"nothing fits up to {most:,} GPUs"
        rows = [] if unsure is None else [self._limit(f"{question}, unsure", unsure, "")]
        return [*rows, self._limit(question, sure, tried)]

    def _longest_on_this_mesh(self) -> tuple[Limit, int]:
        """Return the longest sequence on this mesh, and its tokens; fields that are not named are chosen anew."""
        cfg = self._with_open_fields()
        choices = choices_of_mesh(cfg, self.cluster)
        length = limits.longest_on(cfg, self.cluster, choices)
        question = "longest sequence on this mesh"
        if not length:
            return self._limit(question, None, "no length fits"), 0
        cfg, _ = choose_auto(limits.with_length(cfg, length), self.cluster)
        step = estimate(Run.of(cfg, self.cluster.num_gpus), self.cluster)
        return self._limit(question, Reach(config=cfg, step=step), ""), length

    def _with_open_fields(self) -> Config:
        """Return the chosen configuration with recomputation and micro-batches open, where they are not given."""
        free: dict[str, Any] = {"remat": "auto", "microbatches": AUTO}
        if self.options.mesh != "auto":
            free = {name: getattr(self.requested.train, name) for name in free}
        for name in free:
            if f"train.{name}" in self.options.named:
                free[name] = getattr(self.requested.train, name)
        return with_changes(self.chosen, mesh=self.chosen.mesh, **free)

    def _longest_on_any_mesh(self, fitting: int, tell: output.Tell) -> Limit:
        """Return the longest sequence on these GPUs; `fitting` tokens fit."""
        choices = self._named(self.cluster.num_gpus, mesh=False)
        length = limits.longest(self.requested, self.cluster, choices, fitting, tell)
        question, reach = "longest sequence on any mesh", None
        if length:
            tell(f"searching for the fastest with {length:,} tokens")
            longer = limits.with_length(self.requested, length)
            reach = limits.fastest(longer, self.cluster, choices)
        return self._limit(question, reach, "no length fits")

    def _limit(self, question: str, reach: Reach | None, tried: str) -> Limit:
        question += f", {self.resort}" * bool(self.resort)
        if reach is None:
            return Limit(question=question, step=None, tried=tried)
        command = train_command(self.options.recipe, reach.config)
        return Limit(question=question, step=reach.step, tried="", command=command)
