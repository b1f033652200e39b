"""Find the fastest legal way to train a model that fits.

The playbook's three steps (chapter "Finding the Best Training Configuration"): fit the model, reach the global batch,
maximise throughput. Every candidate reaches the batch; the formulas of `memory.py` say which fit, and
`step_time.py` ranks them, thousands in seconds. The best few are then compiled and timed by the caller's `evaluate`,
and the winner is the fastest of those. `cp` is tried from `LONG` tokens on, and where nothing that this release runs
fits without; `ep` for models with experts, within a node where something fits so.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.config import AXES, Config, MeshConfig, Split, require, require_type
from ultrascale_jax.plan.formulas.memory import breakdown, fits_host, least_with_any_policy
from ultrascale_jax.plan.formulas.step_time import Step
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.search.leanest import leanest_verdict
from ultrascale_jax.plan.search.search_space import (
    INPUTS_AND_ATTENTION,
    OFFLOADED,
    POLICIES,
    Choices,
    Space,
    Variants,
    changed_options,
    chosen,
    configured,
    divisors,
    drawback,
    enumerate_runs,
    optimizer_options,
    with_moments_on_host,
    with_smaller_moments,
    with_smaller_weights,
)
from ultrascale_jax.plan.search.split import Judged, fewest_layers, neighbours
from ultrascale_jax.plan.verdict import (
    DOES_NOT_FIT,
    FITS,
    LIKELY,
    SETTLES,
    UNSURE,
    Verdict,
    by_formula,
)
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

EQUAL = 1.02
"""Times the step of the fastest that one may take which has fewer axes, offloads nothing, or has one policy for all
layers: the formulas' own error is larger."""

NEAR = 1.25
"""A candidate that needs up to so many times the memory is a near miss."""

NEAR_MISSES, NEAR_RUNS = 3, 8
"""Meshes of near misses that are shown, and the runs with the least memory of each, of which the fastest is shown."""

PROMISING = 1.5
"""A kind of candidate is not compiled if by formula the best of it is so many times slower than the best of all."""

LONG, PIECE = 2**13, 2**12
"""Tokens of a sequence from which on cp is tried even where all fits without, and of a rank's shard of it at least:
NVIDIA's recipes of Llama 3 halve 8,192 tokens (docs/planning/published_runs.csv)."""

EXPLORE = 5 / 8
"""Share of the compilations that go to the best of different kinds, the others to more of the fastest kind."""

SPARED = ("recomputation", "exposed offload", "exposed ep", "bubble")
"""Parts of a step of which another policy can take less."""

NEEDLESS = "recomputes without need"
"""The reason of a run that is left out where less recomputation fits."""


RESORTS = (with_moments_on_host,), (with_smaller_moments, with_smaller_weights)
"""Ways to leave less of the optimizer's state on a GPU, where nothing else fits: first the exact ones, then
the ones that round, from the one that rounds the least. They are named, and never chosen."""


type Evaluate = Callable[[Config], StepPrediction]
"""Compiles one configuration and times it; may raise `NotCompiled`."""

type Kind = tuple[int, int, bool, bool, bool]
"""Properties that decide how far the formulas err: one compiled candidate corrects all of its kind."""


class NotCompiled(Exception):
    """A candidate could not be compiled; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train the model, with its prediction and its compiled step."""

    formula: StepPrediction
    refusal: str
    """Why it is not recommended; empty if it may be."""
    compiled: StepPrediction | None = None
    failure: str = ""
    """Why it did not compile."""

    @property
    def run(self) -> Run:
        """The run that it is."""
        return self.formula.run

    @property
    def best(self) -> StepPrediction:
        """By the compiled program, or by formula and uncorrected."""
        return self.compiled or self.formula

    @property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return self.best.verdict

    def configured(self, cfg: Config) -> Config:
        """Return `cfg`, for which it was found, with its mesh, schedule, micro-batches and recomputation."""
        return configured(cfg, self.run)


class Search:
    """One search under way; its results so far can be read at any time, also after an interrupt."""

    def __init__(
        self,
        cfg: Config,
        cluster: Cluster,
        choices: Choices | None = None,
    ):
        """Search for the model, batch and sequence length of `cfg` on `cluster`.

        Args:
          choices: what is pinned; of several global batches the one with the most tokens a second wins.
        """
        self.cfg, self.cluster = cfg, cluster
        self.counts = dict.fromkeys(("candidates", FITS, UNSURE, DOES_NOT_FIT, NEEDLESS), 0)
        """Number of candidates, and of those pruned, by reason."""
        self._candidates: dict[Run, Candidate] = {}
        self._misses: list[tuple[int, Run]] = []
        self._neighbours: list[tuple[Judged, Judged]] = []
        self._choices = choices or {}
        self._space = Space()
        self._ratios: dict[Kind, list[float]] = {}
        self._sorted: list[Candidate] = []
        self._winner: Candidate | None = None
        self._last_step: Step | None = None

    def predict(self, advance: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Rank all candidates by formula; `advance` gets the number done, and of all."""
        with _uncollected():
            self._predict_all(advance)

    def _predict_all(self, advance: Callable[[int, int], None]) -> None:
        axes, sizes = [axis for axis in AXES if axis not in ("cp", "ep")], self._pieces()
        within, across = self._parts()
        self._predict(axes, {**sizes, **within, **self._choices}, advance)
        if not self._usable and across and "ep" not in self._choices:
            self._predict(axes, {**sizes, **across, **self._choices}, advance)
        if not self._usable and "cp" not in self._choices:
            self._predict([*axes, "cp"], {**within, **self._choices}, advance)
        self._add_splits()
        if not self._candidates and (self.closest or (math.inf,))[0] > NEAR * self.usable_bytes:
            # The state of most is far too large: find the leanest of all.
            self._space = Space()
            self._misses.clear()
            self.counts |= dict.fromkeys(("candidates", DOES_NOT_FIT), 0)
            lean = {"remat": ("full",), "stash": ("input",), "schedule": ("1f1b", "interleaved")}
            self._predict([*axes, "cp"], {**within, **lean, **self._choices}, advance, math.inf)

    @property
    def _usable(self) -> bool:
        """Whether something fits for certain that may be recommended."""
        return any(not c.refusal and c.verdict == FITS for c in self._candidates.values())

    def _parts(self) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
        """Return sizes of ep that share the experts equally, in a node and all; nothing for a model without."""
        experts, node = self.cfg.model.experts, self.cluster.gpus_per_node
        if experts is None:
            return {}, {}
        sizes = divisors(math.gcd(experts.num, self.cluster.num_gpus))
        return {"ep": [size for size in sizes if size <= node]}, {"ep": sizes}

    def _pieces(self) -> dict[str, Sequence[int]]:
        """Return sizes of cp that are tried with everything else."""
        tokens = self.cfg.data.seq_len
        sizes = divisors(self.cluster.num_gpus) if tokens >= LONG else ()
        return {"cp": [size for size in sizes if tokens >= size * PIECE]} if sizes else {}

    def _predict(
        self,
        axes: list[str],
        choices: Choices,
        advance: Callable[[int, int], None],
        limit: float = NEAR,
    ) -> None:
        """Predict what is not known yet, but runs whose state alone is `limit` times the memory."""
        space = self._space
        listed = {run.mesh for run in (*(one.of for one in space.variants), *space.oversized)}
        added = enumerate_runs(
            self.cfg,
            self.cluster,
            choices,
            axes,
            limit_bytes=limit * self.usable_bytes,
            listed=listed,
        )
        space.variants.extend(added.variants)
        space.oversized.extend(added.oversized)
        space.illegal.update(added.illegal)
        total, done = sum(map(len, added.variants)), 0
        self.counts["candidates"] += total + len(added.oversized)
        self.counts[DOES_NOT_FIT] += len(added.oversized)
        self.counts |= {f"illegal: {name}": n for name, n in space.illegal.items()}
        for variants in added.variants:
            self._predict_variants(variants, limit * self.usable_bytes)
            done += len(variants)
            advance(done, total)

    def _predict_variants(self, variants: Variants, limit: float) -> None:
        """Predict runs that differ in the tensors kept for the backward pass, from the one that keeps the most.

        A run that fits with room excludes the runs that keep less, but `none` does so only in a pipeline: elsewhere
        `selective` may be faster (`Step.kept_beyond_names`). One that offloads does not, for copies may be waited for,
        nor `dots` with experts, whose gate and up it repeats.
        """
        if least_with_any_policy(variants.of) > limit:
            self.counts[DOES_NOT_FIT] += len(variants)  # far from a near miss
            return
        least = breakdown(variants[-1]).peak_bytes
        if by_formula(least, self.usable_bytes) == DOES_NOT_FIT:
            self.counts[DOES_NOT_FIT] += len(variants)
            self._misses.append((least, variants[-1]))
            return
        enough, judged, step = False, list[Judged](), self._step(variants.of)
        for place, run in enumerate(variants, start=1):
            if enough and run.remat in POLICIES:
                self.counts[NEEDLESS] += 1
                continue
            peak = least if place == len(variants) else breakdown(run).peak_bytes
            verdict = by_formula(peak, self.usable_bytes)
            if not fits_host(run, self.cluster.gpu):
                verdict = DOES_NOT_FIT
            judged.append(Judged(run, peak, verdict))
            if verdict == DOES_NOT_FIT:
                self.counts[DOES_NOT_FIT] += 1
                self._misses.append((peak, run))
                continue
            self.counts[verdict] += 1
            self._keep(_candidate(step.with_policy(run), peak))
            slower = () if run.mesh.pp > 1 else ("none", *OFFLOADED, INPUTS_AND_ATTENTION)
            if run.mesh.pp == 1 and run.shape.experts is not None:
                slower += ("dots",)
            is_fastest = run.remat in POLICIES and run.remat not in slower
            enough |= is_fastest and verdict == FITS
        if "remat" not in self._choices:
            self._neighbours += neighbours(judged)

    def _step(self, run: Run) -> Step:
        """Return the step of `run`, from the one before where only the schedule differs."""
        last = self._last_step
        same_step = last is not None and last.run.differs_in_schedule(run)
        self._last_step = last.with_schedule(run) if last and same_step else Step(run, self.cluster)
        return self._last_step

    def _add_splits(self) -> None:
        """Add runs with two policies where they can be faster than all candidates."""
        fitting = [c for c in self._candidates.values() if c.verdict == FITS]
        fastest = min(map(self.token_s, fitting), default=math.inf)
        for lean, rich in self._neighbours:
            step = self._candidates[lean.run].formula
            spared = sum(step.parts.get(name, 0.0) for name in SPARED)
            if (step.step_s - spared) / step.run.step_tokens > fastest:
                continue
            if (split := fewest_layers(lean, rich, self.cluster.gpu)) is None:
                continue
            run, peak = split
            self._space.variants.append(Variants(of=run, policies=[(run.stash, run.remat)]))
            self.counts["candidates"] += 1
            self.counts[FITS] += 1
            self._keep(_candidate(Step(run, self.cluster), peak))
        self._neighbours.clear()

    def compile(self, evaluate: Evaluate, most: int) -> Iterator[Candidate]:
        """Compile `most` candidates that may be recommended, and yield each before it is compiled.

        First the best of several kinds, in turn with and without a pipeline and cp, then more of the kind that turns
        out the fastest. If none of them fits, up to as many again are tried; if two fail and none succeeds, no more.
        """
        for attempt in range(2 * most):
            tried = [c for c in self._candidates.values() if c.compiled or c.failure]
            compiled = [c for c in tried if c.compiled]
            following = self._next([c.run for c in tried], explore=attempt < EXPLORE * most)
            enough = attempt >= most and any(c.verdict == FITS for c in compiled)
            if following is None or enough or (len(tried) >= 2 and not compiled):
                return
            yield following
            try:
                result = evaluate(configured(self.cfg, following.run))
            except NotCompiled as error:
                done = dataclasses.replace(following, failure=str(error))
            else:
                done = dataclasses.replace(following, compiled=result)
                ratio = result.step_s / following.formula.step_s
                self._ratios.setdefault(kind(done.run), []).append(ratio)
            self._keep(done)

    def _keep(self, candidate: Candidate) -> None:
        self._candidates[candidate.run] = candidate
        self._sorted, self._winner = [], None

    def _next(self, tried: list[Run], *, explore: bool) -> Candidate | None:
        """Choose the candidate to compile next: to `explore`, one of a kind and family of which few were `tried`."""
        ours = [c for c in self.ranking if not c.refusal]
        waiting = [c for c in ours if not (c.compiled or c.failure)]
        if not waiting:
            return None
        limit = PROMISING * min(_token_s(c.formula) for c in ours)
        kinds, families = {kind(run) for run in tried}, Counter(family(run) for run in tried)
        unknown = [c for c in waiting if kind(c.run) not in kinds and _token_s(c.formula) <= limit]
        if explore and unknown:
            return min(unknown, key=lambda c: families[family(c.run)])
        same_kind = (c for c in waiting if kind(c.run) == kind(ours[0].run))
        return next(same_kind, waiting[0])

    @property
    def usable_bytes(self) -> int:
        """Bytes that a run may take on one GPU."""
        return self.cluster.gpu.usable_bytes

    def correction(self, run: Run) -> float:
        """Return compiled over formula in a step's time: the median of the compiled runs of its kind, or of all."""
        if not self._ratios:
            return 1.0
        every = [ratio for ratios in self._ratios.values() for ratio in ratios]
        return statistics.median(self._ratios.get(kind(run), every))

    def step_s(self, candidate: Candidate) -> float:
        """Time a step: of the compiled program, or by formula and corrected."""
        if candidate.compiled:
            return candidate.compiled.step_s
        return candidate.formula.step_s * self.correction(candidate.run)

    def token_s(self, candidate: Candidate) -> float:
        """Divide the time of a step by its tokens: what candidates are compared by."""
        return self.step_s(candidate) / candidate.run.step_tokens

    @property
    def ranking(self) -> list[Candidate]:
        """Sort the candidates that may fit: compiled ones by time, others by formula, then the ones over the
        usable memory, last the ones that the compiler refuted."""
        candidates = self._candidates.values()
        works = any(c.compiled for c in candidates)

        def place(c: Candidate) -> tuple[int, float, int]:
            refuted = not c.best.may_fit or (works and c.failure != "")
            over = c.best.peak_bytes > self.usable_bytes
            rank = 3 if refuted else 0 if c.compiled else 2 if over else 1
            return rank, self.token_s(c), c.best.peak_bytes

        if not self._sorted:
            self._sorted = sorted(candidates, key=place)
        return self._sorted

    @property
    def winner(self) -> Candidate | None:
        """The best that may be recommended."""
        if self._winner is None:
            self._winner = self.recommend([c for c in self.ranking if not c.refusal])
        return self._winner

    def recommend(self, ranking: Sequence[Candidate]) -> Candidate | None:
        """Choose among candidates.

        The choice among the candidates that were compiled and fit, or else fit by formula, is the simplest that is as
        fast as the fastest within `EQUAL`; if there are none, the fastest of the leanest, within `EQUAL`, that may fit.
        """
        fitting = [c for c in ranking if c.verdict == FITS]
        compiled = [c for c in fitting if c.compiled]
        if not fitting:
            may_fit = [c for c in ranking if c.verdict == UNSURE]
            least = min((c.best.peak_bytes for c in may_fit), default=0)
            lean = (c for c in may_fit if c.best.peak_bytes <= EQUAL * least)
            return min(lean, key=self.token_s, default=None)
        works = any(c.compiled for c in ranking)
        chosen = compiled or [c for c in fitting if not (works and c.failure)] or fitting
        limit = EQUAL * min(map(self.token_s, chosen))

        def place(c: Candidate) -> tuple[int, float]:
            axes = sum(size > 1 for size in c.run.mesh.sizes.values())
            both = isinstance(c.run.remat, Split)
            return axes + (c.best.host_bytes > 0) + both, self.token_s(c)

        return min((c for c in chosen if self.token_s(c) <= limit), key=place)

    def faster(self, best: Candidate) -> Candidate | None:
        """Return the fastest that probably fits, if it beats `best` beyond `EQUAL`.

        Where there is none, and `best` fits for certain, any that may fit will do.
        """
        limit = self.token_s(best) / EQUAL
        unsure = [c for c in self.ranking if c.verdict == UNSURE and not (c.refusal or c.failure)]
        faster = [c for c in unsure if self.token_s(c) < limit]
        likely = [c for c in faster if c.best.peak_bytes <= LIKELY * self.usable_bytes]
        worth = likely or (faster if best.verdict == FITS else [])
        return min(worth, key=self.token_s, default=None)

    @functools.cached_property
    def resorts(self) -> dict[str, Candidate]:
        """The best with less of the optimizer's state on a GPU, by options, where only so it fits for certain, or may:
        with moments in the host's memory, which computes the same, and with moments, or weights too, in bfloat16."""
        ours = DOES_NOT_FIT if self.winner is None else self.winner.verdict
        enough = {FITS: (), UNSURE: (FITS,), DOES_NOT_FIT: (FITS, UNSURE)}[ours]
        winners: dict[str, Candidate] = {}
        for ways in RESORTS if enough else ():
            for cfg in filter(None, (way(self.cfg) for way in ways)):
                if leanest_verdict(cfg, self.cluster, self._choices) not in enough:
                    continue
                search = Search(cfg, self.cluster, self._choices)
                search.predict()
                if (best := search.winner) is not None and best.verdict in enough:
                    winners[optimizer_options(self.cfg, cfg)] = best
                    if best.verdict == FITS:
                        break
        return winners

    @property
    def closest(self) -> tuple[int, Run] | None:
        """The run that needs the least memory among the runs that do not fit, and its bytes."""
        return min(self._misses, key=lambda miss: miss[0], default=None)

    @property
    def answer(self) -> str:
        """The result in one line."""
        winner, usable = self.winner, f"{self.usable_bytes / GIB:.1f} GiB"
        if winner is not None:
            failure = f"; by formula, since it does not compile: {winner.failure}"
            text = f"best: {winner.run.label}: {winner.verdict}{failure if winner.failure else ''}"
            text += f", {self.step_s(winner):.3g} s a step"
            if winner.verdict == UNSURE:
                text += f", {winner.best.peak_bytes / GIB:.1f} of {usable} by formula"
            return "; ".join([text + self.doubt(winner), *self._resorts_help()])
        if ranking := self.ranking:
            why = ranking[0].refusal or "none that was compiled fits"
            return f"no run that fits by formula can be recommended: {why}"
        if self.closest is None:
            return "no candidate was tried"
        need, run = self.closest
        lacks = (
            f"needs {need / GIB:.1f} GiB of the {usable} that one {self.cluster.gpu.name} can give"
        )
        fixes = self._resorts_help() or ["take more GPUs, or a shorter sequence", self.not_enough]
        return "; ".join([f"nothing fits: the closest, {run.label}, {lacks}", *filter(None, fixes)])

    def _resorts_help(self) -> list[str]:
        """Say what fits with less of the optimizer's state on a GPU; nothing where that is not needed, or no help."""
        said = []
        for options, best in self.resorts.items():
            step, fits = best.formula, "fits" if best.verdict == FITS else "may fit"
            size = f"{step.peak_bytes / GIB:.1f} GiB, {step.step_s:.3g} s a step"
            said.append(f"{fits} with {options}: {best.run.label}, {size}")
        return said

    @property
    def not_enough(self) -> str:
        """The bytes that less of the optimizer's state on a GPU would save, where none of that is enough; or empty."""
        if self.closest is None or self.resorts:
            return ""
        (need, run), saved = self.closest, []
        for cfg in filter(None, (way(self.cfg) for ways in RESORTS for way in ways)):
            less = need - breakdown(run.with_optimizer(cfg)).peak_bytes
            saved.append(f"{optimizer_options(self.cfg, cfg)} saves {less / GIB:.1f} GiB")
        return f"not enough: {', '.join(saved)}" if saved else ""

    def doubt(self, best: Candidate) -> str:
        """Say what `plan compile` would settle: whether `best` fits, and one that is faster; empty for nothing."""
        text, other = "", self.faster(best)
        if other is not None:
            free = any(len(self._choices.get(axis, ())) != 1 for axis in AXES)
            options = changed_options(self.cfg, other.configured(self.cfg), mesh=free)
            share, step_s = other.best.peak_bytes / self.usable_bytes, self.step_s(other)
            text = f"; faster but unsure, {share:.0%} of the memory by formula: {options}, {step_s:.3g} s a step"
        settles = "`plan compile` with these options settles it" if other else SETTLES
        return f"{text}; {settles}" if text or best.verdict == UNSURE else ""

    def rows(self, top: int) -> dict[str, list[tuple[Candidate, str]]]:
        """Return candidates and their verdicts by section: `top` meshes, the winner with one change, near misses."""
        best = self.winner
        ranking = ([best] if best else []) + [c for c in self.ranking if c is not best]
        near = self._near_misses()
        if not near and not ranking and self.closest is not None:
            near = [self.closest]
        missed = [_candidate(Step(run, self.cluster), peak) for peak, run in near]
        missed.sort(key=self.token_s)
        sections = {
            "the best of each mesh": best_per_mesh(ranking)[:top],
            "one change to the best": [] if best is None else self._changed(best),
            "would need more memory": best_per_mesh(missed)[:NEAR_MISSES],
        }
        return {
            name: [(c, self._verdict(c, best)) for c in candidates]
            for name, candidates in sections.items()
        }

    def _near_misses(self) -> list[tuple[int, Run]]:
        """Return the runs of each mesh that do not fit and need the least memory, up to `NEAR` times what there is."""
        by_mesh: dict[MeshConfig, list[tuple[int, Run]]] = {}
        for miss in sorted(self._misses, key=lambda miss: miss[0]):
            if miss[0] <= NEAR * self.usable_bytes:
                by_mesh.setdefault(miss[1].mesh, []).append(miss)
        return [miss for misses in by_mesh.values() for miss in misses[:NEAR_RUNS]]

    def _changed(self, best: Candidate) -> list[Candidate]:
        """Yield other micro-batches, ZeRO stages, recompute policies or schedules on the mesh of `best`."""
        alternatives = [
            run
            for variants in self._space.variants
            if variants.of.mesh == best.run.mesh
            for run in variants
            if sum(a != b for a, b in zip(_work(run), _work(best.run), strict=True)) == 1
        ]
        candidates = [
            self._candidates.get(run)
            or _candidate(Step(run, self.cluster), breakdown(run).peak_bytes)
            for run in alternatives
        ]
        return sorted(candidates, key=lambda c: (not c.best.may_fit, self.token_s(c)))

    def _verdict(self, candidate: Candidate, best: Candidate | None) -> str:
        """Say what distinguishes `candidate`, or why it lost to `best`."""
        if not candidate.best.may_fit:
            source, step = "compiled, it" if candidate.compiled else "it", candidate.best
            sizes, whose = (step.needed_bytes, self.usable_bytes), ""
            if not step.fits_host:
                sizes, whose = (step.host_bytes, step.gpu.usable_host_bytes), " of the host"
            need, usable = (size / GIB for size in sizes)
            return f"does not fit: {source} needs {need:.1f} of {usable:.1f} GiB{whose}"
        unsure = "unsure whether it fits" if candidate.verdict == UNSURE else ""
        if candidate is best:
            return f"best{unsure and f'; {unsure}'}"
        failure = f"does not compile: {candidate.failure}" if candidate.failure else ""
        slower = "" if best is None else self._difference(candidate, best)
        return "; ".join(text for text in (failure, candidate.refusal, slower, unsure) if text)

    def _difference(self, candidate: Candidate, best: Candidate) -> str:
        """Say how much slower or faster than `best`, and which part costs the most, both from one source."""
        share = self.token_s(candidate) / self.token_s(best) - 1
        if abs(share) < 0.001:
            return "as fast"
        text = f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}"
        alone = _token_s(candidate.formula) / _token_s(best.formula) - 1
        one_source = candidate.compiled is not None and best.compiled is not None
        if not one_source and alone * share < 0:
            return f"{text}, by formula alone {alone:+.1%}"
        ours, other = (
            (c.best if one_source else c.formula).scaled(1 / c.run.step_tokens).parts
            for c in (candidate, best)
        )
        sign = math.copysign(1, share)
        costs = {
            name: sign * (ours.get(name, 0.0) - other.get(name, 0.0))
            for name in sorted({*ours, *other})
        }
        name, cost = max(costs.items(), key=lambda item: item[1])
        return f"{text}: {name} {sign * cost / sum(other.values()):+.1%}" if cost > 0 else text


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the search for cycles, of which candidates have none: it takes an eighth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _candidate(step: Step, peak_bytes: int) -> Candidate:
    return Candidate(formula=step.predict(peak_bytes), refusal=drawback(step.run))


def _token_s(step: StepPrediction) -> float:
    return step.step_s / step.run.step_tokens


def kind(run: Run) -> Kind:
    """Return tensor group, ZeRO stage, cp, ep, pp: what communication they hide is where formulas err most."""
    return run.mesh.tensor, run.zero, run.mesh.cp > 1, run.mesh.ep > 1, run.mesh.pp > 1


def family(run: Run) -> tuple[bool, bool]:
    """Return whether there is a pipeline, and cp: the formulas of one say little of another."""
    return run.mesh.pp > 1, run.mesh.cp > 1


def best_per_mesh(ranking: Iterable[Candidate]) -> list[Candidate]:
    """Return the compiled, and the first of each mesh."""
    seen: set[MeshConfig] = set()
    kept = []
    for c in ranking:
        if c.compiled or c.run.mesh not in seen:
            kept.append(c)
        seen.add(c.run.mesh)
    return kept


def _work(run: Run) -> tuple[Any, ...]:
    pipeline = run.schedule, run.virtual_stages
    work = run.microbatches, run.global_batch, run.zero, (run.remat, run.stash)
    return *work, pipeline, run.context


def search(
    cfg: Config, cluster: Cluster, *, fixed: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Rank every legal way to train `cfg` on `cluster` by formula, as `plan search --compile 0` does; imports no JAX.

    Args:
      cfg: model, sequence length and global batch; its mesh, ZeRO stage, micro-batches and recomputation do not matter.
      cluster: the GPUs, of `find_cluster`.
      fixed: a field of a candidate to the value, or the list of values, that it may take, as `{"tp": 8, "pp": [1, 2]}`.

    Returns:
      The candidates that may fit, the recommended one first, the others from the fastest to the slowest. Each has its
      `run`, `best` (a prediction with `step_s`, `peak_bytes` and `parts`) and `verdict`; `configured(cfg)` is its
      configuration. The list is empty where nothing fits.

    Raises:
      UserError: a field that no candidate has, a value that it cannot have, or nothing is legal.
    """
    require_type("cfg", cfg, Config, "of a ModelConfig make Config(model=...)")
    require_type("cluster", cluster, Cluster, "find_cluster(None, 'h100', num_gpus) makes one")
    require_type("fixed", fixed or {}, Mapping, "as {'tp': 8}")
    ranked = Search(cfg, cluster, {name: chosen(name, v) for name, v in (fixed or {}).items()})
    ranked.predict()
    fix = (
        f"nothing is legal on {cluster.num_gpus} GPUs; take another number of GPUs, batch or values"
    )
    require(ranked.counts["candidates"] > 0, "fixed", dict(fixed or {}), fix)
    best = ranked.winner
    return ([best] if best else []) + [c for c in ranked.ranking if c is not best]
