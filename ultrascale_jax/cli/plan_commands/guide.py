"""Explain the way to a configuration in the playbook's three steps: `ultrascale plan guide`.

Fit the model, reach the global batch, maximise throughput: at each step what is ruled out and why, and at the end days,
GPU hours, energy and cost of the whole training, here and on other clusters. All by formula; nothing is compiled.
"""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common, search
from ultrascale_jax.cli.plan_commands.bill import Options, terms
from ultrascale_jax.cli.plan_commands.words import plan_command, train_command
from ultrascale_jax.config import Config, MeshConfig, Remat, UserError, require, with_changes
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.launch.failures import INTERRUPTED
from ultrascale_jax.plan.bill import Bill, Terms, bill, energy
from ultrascale_jax.plan.formulas.checkpoint import Checkpoint, checkpoint
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import line, table, wrap
from ultrascale_jax.plan.search.ranking import LONG, Search
from ultrascale_jax.plan.search.search_space import configured, named_choices
from ultrascale_jax.plan.verdict import DOES_NOT_FIT, by_formula
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB, counted, decimal, rounded

INSTEAD = ("a100", "h100", "h200", "b200")
"""GPUs whose bill is shown too."""

WAYS = {
    "pp": "with a pipeline",
    "cp": "with the sequence split",
    "tensor": "with matrices split",
    "ep": "with experts split",
}
"""Name of a mesh by the first of these axes that it has."""

DATA = "data parallel alone"

FACTORS = (0.5, 2)
"""GPUs, and speed of the network, of other clusters, as multiples of this one's."""

CHANGES = 8
"""Changes to the best that are shown."""


@dataclass(frozen=True, kw_only=True)
class GuideReport:
    """The three steps, and the bill."""

    label: str
    gpus: int
    usable_bytes: int
    parameters: int
    seq_len: int
    terms: Terms
    """Tokens, price, power and failures of the full training."""
    fit: list[dict[str, Any]]
    """Step 1: ways that hold ever less on each GPU."""
    batch: dict[str, Any]
    """Step 2: how the sequences of one step spread over the GPUs."""
    throughput: list[dict[str, Any]]
    """Step 3: the fastest mesh of each kind."""
    changes: list[dict[str, Any]]
    """Effects of single changes to the best."""
    answer: str
    command: str | None
    """Command that trains the best; none where nothing can be recommended."""
    check: str | None
    """Command that compiles it."""
    step: dict[str, Any] | None
    checkpoint: Checkpoint | None
    bill: Bill | None
    energy: str
    """Power that the bill's energy counts."""
    other_clusters: list[dict[str, Any]]

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object."""
        return dataclasses.asdict(self) | {"tokens": self.terms.tokens}

    def __rich__(self) -> Group:
        gib, state = self.usable_bytes / GIB, 16 * self.parameters / GIB
        parts: list[Any] = [
            f"{self.label}: {self.parameters / 1e9:.3g} B parameters, sequences of {self.seq_len:,} tokens",
            "",
            "Step 1: fit the model",
            f"AdamW keeps 16 bytes for each parameter, {state:,.0f} GiB in all; one GPU can give {gib:.1f} GiB. "
            "One sequence on each GPU:",
            self._fit(),
            *("", "Step 2: reach the batch", self._batch()),
            *("", "Step 3: maximise throughput", "The fastest of each kind of mesh that fits:"),
            *(self._throughput(), self.answer),
        ]
        if self.command is not None:
            parts += [
                *(self.command, "", f"The whole training: {decimal(self.terms.tokens)} tokens"),
                self._bill(),
                self.energy,
                *self._saves(),
                f"Compile the program before you rent the GPUs: {self.check}",
            ]
        return Group(*(line(part) if isinstance(part, str) else part for part in parts))

    def _fit(self) -> Table:
        made = table(("way",), ("GiB", "of it activations"), ("verdict",))
        for row in self.fit:
            if row["peak_bytes"] is None:
                made.add_row(row["way"], "", "", f"not possible: {row['illegal']}")
                continue
            over = row["peak_bytes"] / self.usable_bytes
            verdict = row["verdict"]
            if verdict == DOES_NOT_FIT:
                verdict = f"ruled out: {over:,.2f} times what a GPU can give"
            sizes = (f"{row[name] / GIB:,.1f}" for name in ("peak_bytes", "activation_bytes"))
            made.add_row(row["way"], *sizes, verdict)
        return made

    def _batch(self) -> str:
        b = self.batch
        tokens = decimal(b["global_batch"] * b["seq_len"])
        size = f"{counted(b['global_batch'], 'sequence')} of {b['seq_len']:,} tokens, {tokens}"
        text = f"A step trains on {size} in all; {b['sharing']}."
        if "batch_shards" in b:
            text += (
                f" The best mesh below splits them over {counted(b['batch_shards'], 'shard')}; each computes "
                f"{counted(b['sequences'], 'sequence')} at once, {counted(b['microbatches'], 'time')} a step."
            )
        return text

    def _throughput(self) -> Table:
        made = table(("way", "fastest"), ("GiB", "s a step", "tok/s/GPU", "MFU"), ("verdict",))
        for row in (*self.throughput, None, *self.changes):
            if row is None:
                made.add_section()
                made.add_row("one change to the best")
                continue
            numbers = (f"{row['peak_bytes'] / GIB:.1f}", f"{row['step_s']:.3g}")
            speed = (f"{row['tokens_per_s_gpu']:,.0f}", f"{row['mfu']:.1%}")
            made.add_row(row["way"], row["label"], *numbers, *speed, row["why"])
        return made

    def _bill(self) -> Table:
        columns = {"days": "days", "gpu_hours": "GPU hours", "mwh": "MWh"}
        if self.terms.price is not None:
            columns |= {"usd": "USD", "usd_per_million_tokens": "USD/M tokens"}
            columns |= {"even_price": "break-even USD/h"}
        made = table(("cluster",), tuple(columns.values()), ("mesh",))
        assert self.bill is not None and self.step is not None  # there is a best
        best: dict[str, Any] = {"what": "as asked", "label": self.step["label"]} | vars(self.bill)
        for row in (best, *self.other_clusters):
            cells = [row.get(name) for name in columns]
            shown = ["" if n is None else rounded(n) for n in cells]
            made.add_row(row["what"], *shown, row["label"])
        return made

    def _saves(self) -> list[str]:
        """Return the lines about checkpoints and failures."""
        assert self.bill is not None and self.checkpoint is not None  # there is a best
        failing = self.bill.interruptions
        times = "without failures" if failing is None else failing.text
        return [self.checkpoint.text, f"Times are by formula, {times}."]

    def figure(self) -> Bars:
        """Draw step 1: the memory of each way."""
        bars = []
        for row in self.fit:
            if row["peak_bytes"] is not None:
                activations = row["activation_bytes"] / GIB
                state = row["peak_bytes"] / GIB - activations
                parts = {"parameters, gradients and optimizer": state, "activations": activations}
                bars.append(Bar(label=wrap(row["way"], 14), parts=parts))
        return Bars(
            name="guide",
            title=f"One sequence on each GPU: {self.label}",
            caption="By formulas: the peak of one GPU in ways that hold ever less on each.",
            panels={"": bars},
            unit="GiB",
            x="",
            limit=self.usable_bytes / GIB,
            limit_name=f"usable: {self.usable_bytes / GIB:.0f} GiB",
        )


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "guide", Options, __doc__)
    with command_line.user_errors():
        with output.working("step 1: fit the model") as tell:
            report = explain(cfg, options, cluster, tell)
        output.show("guide", report, as_json=options.json, figure=options.figure, width=150)
    if report.command is None:
        raise SystemExit(1)


def explain(cfg: Config, options: Options, cluster: Cluster, tell: output.Tell) -> GuideReport:
    """Return the results of all steps; `tell` gets the progress.

    Raises `UserError` where nothing is legal, `SystemExit` where Ctrl-C interrupts the search.
    """
    bill_terms = terms(cfg, options)
    fit = ladder(cfg, cluster, options)
    ranking = Search(cfg, cluster, named_choices(cfg, options.named, options.gpus))
    if search.predict(ranking, tell):
        raise SystemExit(INTERRUPTED)
    fix = search.illegal(ranking, options.gpus)
    require(ranking.counts["candidates"] > 0, "gpus", options.gpus, fix)
    best = None if ranking.winner is None else ranking.winner.best
    trained = configured(cfg, best.run) if best else None
    return GuideReport(
        label=f"{options.recipe} on {options.gpus} {cluster.gpu.name}",
        gpus=cluster.num_gpus,
        usable_bytes=cluster.gpu.usable_bytes,
        parameters=ModelShape.of(cfg.model).num_params,
        seq_len=cfg.data.seq_len,
        terms=bill_terms,
        fit=fit,
        batch=batch(cfg, cluster, best),
        throughput=throughput(ranking),
        changes=changes(ranking),
        answer=ranking.answer,
        command=train_command(options.recipe, trained) if trained else None,
        check=plan_command("compile", trained, options) if trained else None,
        step=best.summary() if best else None,
        checkpoint=checkpoint(best.run, cluster.gpu, bill_terms.storage_gbs) if best else None,
        bill=bill(best, bill_terms) if best else None,
        energy=energy(cluster.gpu, bill_terms.watts),
        other_clusters=other_bills(cfg, cluster, best, bill_terms, options, tell) if best else [],
    )


def ladder(cfg: Config, cluster: Cluster, options: Options) -> list[dict[str, Any]]:
    """Return the memory of one sequence a GPU in ways that hold ever less on each GPU, from the simplest."""
    n, node = cluster.num_gpus, min(cluster.gpus_per_node, cluster.num_gpus)
    nodes, mesh_of = n // node, MeshConfig.of
    ways: list[tuple[str, MeshConfig, int, Remat]] = [
        ("every GPU holds the whole model", mesh_of(dp=n), 0, "none"),
        ("layers are computed again in the backward pass", mesh_of(dp=n), 0, "full"),
        ("ZeRO-1 splits the optimizer's state", mesh_of(fsdp=n), 1, "full"),
        ("ZeRO-2 splits sums of gradients: none here", mesh_of(fsdp=n), 2, "full"),
        ("ZeRO-3 splits the parameters too", mesh_of(fsdp=n), 3, "full"),
        ("ZeRO-1, and a node shares each matrix", mesh_of(fsdp=nodes, sp=node), 1, "full"),
        ("ZeRO-3, and a node shares each matrix", mesh_of(fsdp=nodes, sp=node), 3, "full"),
    ]
    if cfg.data.seq_len >= LONG:
        way = "ZeRO-3, and a node shares each sequence"
        ways.append((way, mesh_of(fsdp=nodes, cp=node), 3, "full"))
    rows, seen = [], set()
    for way, mesh, zero, remat in ways:
        if (mesh, zero, remat) not in seen:
            seen.add((mesh, zero, remat))
            rows.append({"way": way} | _memory(cfg, cluster, options, mesh, zero, remat))
    return rows


def _memory(
    cfg: Config, cluster: Cluster, options: Options, mesh: MeshConfig, zero: int, remat: Remat
) -> dict[str, Any]:
    run = {"mesh": mesh.text, "zero": zero, "remat": str(remat)}
    run_cfg = with_changes(
        cfg, mesh=mesh, zero=zero, remat=remat, microbatches=1, global_batch=mesh.batch
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            memory = breakdown(Run.of(run_cfg, options.gpus))
    except UserError as error:
        unknown = dict.fromkeys(("peak_bytes", "activation_bytes", "verdict"))
        return run | unknown | {"illegal": str(error)}
    activations = sum(size for name, size in memory.parts.items() if name.startswith("activations"))
    sizes = {"peak_bytes": memory.peak_bytes, "activation_bytes": activations}
    verdict = by_formula(memory.peak_bytes, cluster.gpu.usable_bytes)
    return run | sizes | {"verdict": verdict, "illegal": ""}


def batch(cfg: Config, cluster: Cluster, best: StepPrediction | None) -> dict[str, Any]:
    """Return how the sequences of one step spread over the GPUs."""
    values = {"global_batch": cfg.train.global_batch, "seq_len": cfg.data.seq_len}
    values |= {"gpus": cluster.num_gpus, "sharing": _sharing(cfg.train.global_batch, cluster)}
    if best is None:
        return values
    run = best.run
    return values | {
        "batch_shards": run.mesh.batch,
        "sequences": run.sequences,
        "microbatches": run.microbatches,
    }


def _sharing(sequences: int, cluster: Cluster) -> str:
    gpus = cluster.num_gpus
    if gpus > sequences:
        return (
            f"{gpus:,} GPUs are more than {counted(sequences, 'sequence')}: several GPUs have to share one, by tensor "
            "or context parallelism, or the layers, by a pipeline"
        )
    each = f"each GPU can take {sequences / gpus:,.4g} of them whole"
    even = "" if sequences % gpus == 0 else "; data parallelism alone cannot split them evenly"
    return f"{each}, one after the other where they do not fit at once{even}"


def throughput(ranking: Search) -> list[dict[str, Any]]:
    """Return the fastest mesh of each kind, and why it lost to the best."""
    first: dict[str, dict[str, Any]] = {}
    for candidate, why in ranking.rows(10**6)["the best of each mesh"]:
        mesh = candidate.run.mesh
        way = next((w for axis, w in WAYS.items() if getattr(mesh, axis) > 1), DATA)
        row = {"way": way, "why": why} | candidate.best.summary()
        if candidate.best.may_fit:
            first.setdefault(way, row)
    return list(first.values())


def changes(ranking: Search) -> list[dict[str, Any]]:
    """Return the effects of other micro-batches, ZeRO stages and recomputation on the best mesh."""
    rows = ranking.rows(1)["one change to the best"][:CHANGES]
    return [{"way": "", "why": why} | c.best.summary() for c, why in rows]


def other_bills(
    cfg: Config,
    cluster: Cluster,
    best: StepPrediction,
    bill_terms: Terms,
    options: Options,
    tell: output.Tell,
) -> list[dict[str, Any]]:
    """Return the bill on other clusters, with the best's pipeline, tensor, context and expert groups.

    Other numbers of GPUs are searched as this one was, with the fields that the command line names but the mesh.
    `even_price` is the price of a GPU hour there at which the training costs as much as on `cluster`.
    """
    n, replace = cluster.num_gpus, dataclasses.replace
    hours = bill(best, bill_terms).gpu_hours
    clusters = {
        f"{factor:g} x the GPUs": replace(cluster, num_gpus=int(factor * n)) for factor in FACTORS
    }
    if cluster.nodes > 1:
        clusters |= {
            f"{factor:g} x the network": replace(cluster, inter_gbs=factor * cluster.inter_gbs)
            for factor in FACTORS
        }
    for name in INSTEAD:
        if name != cluster.gpu.name:
            clusters[f"{name} instead"] = find_cluster(None, name, n)
    rows = []
    for name, other in clusters.items():
        tell(f"other clusters: {name}")
        step, why = _best_on(cfg, other, best.run, options) if other.num_gpus else (None, "")
        row: dict[str, Any] = {"what": name, "label": step.run.label if step else why}
        if step:
            row |= {"step_s": step.step_s, "mfu": step.mfu}
            same_gpu = other.gpu == cluster.gpu
            gpu_terms = bill_terms if same_gpu else replace(bill_terms, price=None, watts=None)
            row |= dataclasses.asdict(bill(step, gpu_terms))
            row["even_price"] = bill_terms.price and bill_terms.price * hours / row["gpu_hours"]
        rows.append(row)
    return rows


def _best_on(
    cfg: Config, cluster: Cluster, like: Run, options: Options
) -> tuple[StepPrediction | None, str]:
    """Return the best step on `cluster`, or none and the reason."""
    axes = ("pp", "ep", "cp", "sp", "tp")
    if cluster.num_gpus != like.num_gpus:
        named = {name for name in options.named if name.partition(".")[0] != "mesh"}
        choices: dict[str, Any] = dict(named_choices(cfg, named, cluster.num_gpus))
    else:
        choices = {axis: (getattr(like.mesh, axis),) for axis in axes} | {"zero": (like.zero,)}
        if like.mesh.pp > 1:
            choices |= {"schedule": (like.schedule,), "virtual_stages": (like.virtual_stages,)}
    ranking = Search(cfg, cluster, choices)
    try:
        ranking.predict()
    except UserError as error:
        return None, str(error)
    if ranking.winner is not None:
        return ranking.winner.best, ""
    if ranking.counts["candidates"]:
        return None, ranking.answer
    return None, search.illegal(ranking, cluster.num_gpus)
