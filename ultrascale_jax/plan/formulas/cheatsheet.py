"""The playbook's cheat-sheet for one model on one cluster: what each axis splits, sends, and whether that can hide.

The formulas are the playbook's with three changes. Sizes are the model's own instead of 16 h^2. Sums of gradients over
a step (dp, ZeRO-1) are in float32, as this trainer makes them. An axis sends the bytes that it has in the run's mesh:
ZeRO communicates over fsdp, ep and cp together (routed experts over fsdp and cp), and dp sums the shards that this
leaves. The GPU's dense peak and the links' bandwidths are those of the data sheets: a lower bound for both sides,
without latencies. In texts, N parameters and L layers of one GPU before ZeRO, n the GPUs of a collective, B the bytes a
second of its link, F the GPU's FLOP/s, T the tokens of a micro-batch on one GPU.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale_jax.config import Experts, MeshConfig
from ultrascale_jax.plan.formulas.costs import ring_bytes
from ultrascale_jax.plan.formulas.framework import kept_names
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Group, Run, group

ZERO_AXES = ("fsdp", "ep", "cp")
"""Axes over which ZeRO splits parameters; `ep` splits routed experts already."""

STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""Strategy of each ZeRO stage."""

BATCH, SHARE = "n x micro-batch x accumulation", "1/n of the batch"

TEXTS = {
    "DP": ("dp", BATCH, "all on each GPU", SHARE, "2F/BT x (n-1)/n / ZeRO's shards"),
    "ZeRO-1": ("fsdp", BATCH, "optimizer / n", SHARE, "3F/2BT x (n-1)/n"),
    "ZeRO-2": ("fsdp", BATCH, "optimizer and gradients / n", SHARE, "F/2BT x (n-1)/n"),
    "ZeRO-3": ("fsdp", BATCH, "all / n", SHARE, "F/BT x (n-1)/n"),
    "TP": (
        *("tp", "unchanged", "layers' parameters and inner activations / n", "1/n of a layer"),
        "4(n-1)hF / (B x parameters of a layer)",
    ),
    "TP + SP": (
        *("sp", "unchanged", "layers' parameters and all activations / n", "1/n of a layer"),
        "4(n-1)hF / (B x parameters of a layer)",
    ),
    "CP": (
        *("cp", "unchanged", "activations / n", "1/n of the sequence"),
        "2KF / (NBs), s tokens of a sequence on one GPU, K of N heads",
    ),
    "PP": (
        *("pp", "accumulation > n - 1", "parameters / n"),
        *("1/n of the layers; idle (n-1)/accumulation", "hF / (B x parameters of a stage)"),
    ),
    "EP": (
        *("ep", BATCH, "experts / n", "1/n of the experts"),
        "2(n-1)F / (nB x matrices x width of an expert)",
    ),
}
"""Strategy to its axis of the mesh, the batch, what it splits of memory and of compute, communication / computation."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One axis."""

    strategy: str
    axis: str
    """Axis of the mesh."""
    size: int
    """Size of the axis in the run; where the run does not use it, one that the cluster suggests."""
    used: bool
    """Whether the run uses it."""
    axes: tuple[str, ...]
    """Axes of the mesh, larger than 1, over which its collectives run: for ZeRO those of `ZERO_AXES`."""
    batch: str
    memory: str
    compute: str
    communication: str
    """Formula of communication over computation."""
    volume: float
    """Bytes that one GPU sends in a step."""
    communication_s: float
    """Time of the communication of one micro-batch, and for dp and ZeRO-1 of the step."""
    computation_s: float
    """Time of the computation that the communication can hide behind."""

    @property
    def ratio(self) -> float:
        """Communication over computation."""
        return self.communication_s / self.computation_s

    @property
    def hidden(self) -> bool:
        """Whether the computation is long enough to hide the communication."""
        return self.ratio <= 1


def cheat_sheet(run: Run, cluster: Cluster) -> list[Row]:
    """Return a row for each axis, in the playbook's order; experts only for a model that has some."""
    sheet = _Sheet(run, cluster)
    rows = [*sheet.data(), *sheet.tensor(), sheet.context(), sheet.pipeline()]
    return rows if run.shape.experts is None else [*rows, sheet.expert(run.shape.experts)]


def bandwidth(mesh: MeshConfig, axis: str, size: int, cluster: Cluster) -> float:
    """Return the bytes a second of one GPU along an axis of `size`.

    `pp` and `cp` send to a neighbour and `ep` from everyone to everyone, each GPU by its own card; the other axes are
    rings (`ring_bandwidth`).
    """
    ranks = group(with_axis(mesh, axis, size), (axis,), cluster.gpus_per_node)
    if axis in ("pp", "cp", "ep"):
        return 1e9 * (cluster.intra_gbs if ranks.nodes == 1 else cluster.inter_gbs)
    return ring_bandwidth(ranks, cluster)


def ring_bandwidth(ranks: Group, cluster: Cluster) -> float:
    """Return the bytes a second of one GPU on a ring.

    Over nodes it uses a network card for each of its ranks in a node.
    """
    if ranks.nodes == 1:
        return cluster.intra_gbs * 1e9
    return min(cluster.intra_gbs, cluster.inter_gbs * ranks.per_node) * 1e9


def with_axis(mesh: MeshConfig, axis: str, size: int) -> MeshConfig:
    """Return `mesh` with `axis` of `size`.

    A batch axis that the mesh does not have takes the place of the one that it has.
    """
    absent = axis in ("dp", "fsdp") and mesh.sizes[axis] == 1 and size > 1
    instead = {"dp": 1, "fsdp": 1} if absent else {}
    return dataclasses.replace(mesh, **(instead | {axis: size}))


class _Sheet:
    """Quantities and helpers that the rows share."""

    def __init__(self, run: Run, cluster: Cluster):
        self.run, self.shape, self.mesh, self.cluster = run, run.shape, run.mesh, cluster
        self.flops = cluster.gpu.peak_flops("bf16")
        self.tokens = run.tokens
        parts = self.mesh.tensor * self.mesh.pp
        self.params = self.shape.num_params / parts
        self.active = self.shape.active_params / parts
        self.layers = self.shape.layers / self.mesh.pp

    def size(self, axis: str, suggested: int) -> int:
        """Return the axis in the run, or what is suggested if the run has none."""
        size = self.mesh.sizes[axis]
        return size if size > 1 else max(2, suggested)

    def row(self, strategy: str, size: int, sent: float, times: float, work: float) -> Row:
        """Compare `sent` bytes along the strategy's axis, `times` as many in a step, with `work` FLOPs."""
        axis = TEXTS[strategy][0]
        seconds = sent / bandwidth(self.mesh, axis, size, self.cluster)
        axes = (axis,) if self.mesh.sizes[axis] > 1 else ()
        return self.compare(strategy, size, axes, (sent * times, seconds), work)

    def compare(
        self,
        strategy: str,
        size: int,
        axes: tuple[str, ...],
        communication: tuple[float, float],
        work: float,
    ) -> Row:
        """Make a row of a step's bytes and a micro-batch's seconds of communication; used if the run has its `axes`."""
        axis, batch, memory, compute, formula = TEXTS[strategy]
        return Row(
            strategy=strategy,
            axis=axis,
            size=size,
            used=bool(axes),
            axes=axes,
            batch=batch,
            memory=memory,
            compute=compute,
            communication=formula,
            volume=communication[0],
            communication_s=communication[1],
            computation_s=work / self.flops,
        )

    def data(self) -> list[Row]:
        """Compare gradients, and with ZeRO-3 parameters, with the passes of a micro-batch.

        A sum over a step is of float32: 4 bytes of a parameter scattered, 4 gathered by dp and 2 by ZeRO-1. ZeRO-2 and
        ZeRO-3 scatter and gather bfloat16, ZeRO-2 the parameters once a step.
        """
        mesh, m, backward = self.mesh, self.run.microbatches, 4 * self.tokens * self.active
        others = mesh.tensor * mesh.cp * mesh.pp * mesh.ep
        batch = max(mesh.dp, mesh.fsdp)
        batch = batch if batch > 1 else self.cluster.num_gpus // others
        dp, fsdp = self.size("dp", batch), self.size("fsdp", batch)
        replicated = with_axis(mesh, "dp", dp)
        shards = self.groups(with_axis(mesh, "fsdp", fsdp), ZERO_AXES)
        if self.run.zero:
            replicas = self.groups(replicated, ("dp",), split=ZERO_AXES)
        else:
            replicas = self.groups(replicated, ("dp", *ZERO_AXES))
        rows = []
        for strategy, groups, width, times, work in (
            ("DP", replicas, 8, 1, backward),
            ("ZeRO-1", shards, 6, 1, backward),
            ("ZeRO-2", shards, 2, m + 1, backward),
            ("ZeRO-3", shards, 6, m, 1.5 * backward),
        ):
            sent, seconds = self.around(groups, width)
            size = dp if strategy == "DP" else fsdp
            rows.append(
                self.compare(strategy, size, self.axes(strategy), (sent * times, seconds), work)
            )
        return rows

    def axes(self, strategy: str) -> tuple[str, ...]:
        """Return the axes over which the run sums gradients as `strategy` does; none if it does not."""
        of_stage = ZERO_AXES if strategy == STAGES[self.run.zero] else ()
        axes = ("dp", *of_stage) if strategy == "DP" else of_stage
        return tuple(axis for axis in axes if self.mesh.sizes[axis] > 1)

    def groups(
        self, mesh: MeshConfig, axes: Sequence[str], split: Sequence[str] = ()
    ) -> list[tuple[float, Group]]:
        """Return parameters of one GPU, split over the axes `split`, with the GPUs along `axes` that share them.

        First the parameters that all tokens meet, then those of routed experts, which `ep` splits already.
        """
        routed = self.shape.routed_params / (mesh.tensor * mesh.pp)
        kinds = (self.params - routed, ()), (routed / mesh.ep, ("ep",))
        groups = []
        for count, without in kinds:
            shards = math.prod(mesh.sizes[axis] for axis in split if axis not in without)
            along = tuple(axis for axis in axes if axis not in without)
            groups.append((count / shards, group(mesh, along, self.cluster.gpus_per_node)))
        return groups

    def around(self, groups: list[tuple[float, Group]], width: float) -> tuple[float, float]:
        """Return the bytes that one GPU sends, and the seconds, for `width` bytes of each parameter on a ring."""
        sent = [ring_bytes("all-gather", width * count, ranks.ranks) for count, ranks in groups]
        rates = [ring_bandwidth(ranks, self.cluster) for _, ranks in groups]
        return sum(sent), sum(size / rate for size, rate in zip(sent, rates, strict=True))

    def tensor(self) -> list[Row]:
        """Compare four collectives of the hidden states in the forward pass of a layer with its products.

        The backward pass has as many. Where it computes again, it also repeats the gathers of both inputs (`sp`), and
        the collective behind attention if its result is not kept.
        """
        whole, rows = self.mesh.tensor, []
        node = max(2, self.cluster.gpus_per_node // whole)
        layer = self.shape.attention_params + self.shape.mlp_params
        per_layer = self.layers * self.run.microbatches
        inputs = 2 if self.run.remat != "none" else 0
        result = 1 if "attn_out" not in kept_names(self.run.remat) else 0
        repeated = {"TP": 2 * result, "TP + SP": inputs + result}
        for strategy in ("TP", "TP + SP"):
            axis = TEXTS[strategy][0]
            n = self.size(axis, node)
            group_size = whole if self.mesh.sizes[axis] > 1 else whole * n
            one = ring_bytes("all-gather", 2 * self.tokens * self.shape.d_model, n)
            times = (8 + repeated[strategy]) / 4 * per_layer
            rows.append(self.row(strategy, n, 4 * one, times, 2 * self.tokens * layer / group_size))
        return rows

    def context(self) -> Row:
        """Compare a neighbour's keys and values with attention's forward pass.

        The backward pass moves three times as many bytes: keys and values in bfloat16, their gradients in float32.
        """
        n = self.size("cp", self.cluster.gpus_per_node)
        tokens = self.run.sequences * self.run.seq_len / n
        heads = self.shape.head_dim / self.mesh.tensor
        step = 4 * tokens * self.shape.num_kv_heads * heads
        scores = 2 * tokens * self.run.seq_len / n * self.shape.num_heads * heads
        times = 4 * self.layers * self.run.microbatches
        return self.row("CP", n, (n - 1) * step, times, (n - 1) * scores)

    def pipeline(self) -> Row:
        """Compare a micro-batch's hidden states with the next stage's forward pass."""
        p = self.size("pp", min(self.cluster.nodes, self.shape.num_layers))
        layers = self.shape.num_layers / p
        layer = (self.shape.attention_params + self.shape.mlp_params) / self.mesh.tensor
        sent = 2 * self.tokens * self.shape.d_model / self.mesh.sp
        return self.row("PP", p, sent, 2 * self.run.microbatches, 2 * self.tokens * layers * layer)

    def expert(self, experts: Experts) -> Row:
        """Compare every token's copies to their experts and back with those experts."""
        shape = self.shape
        n = self.size("ep", min(self.cluster.gpus_per_node, experts.num))
        copies = self.tokens * experts.top_k
        there = ring_bytes("all-to-all", 2 * copies * shape.d_model / self.mesh.sp, n)
        times = 2 * self.run.microbatches * shape.moe_layers / self.mesh.pp
        return self.row(
            "EP", n, 2 * there, times, 2 * copies * shape.expert_params / self.mesh.tensor
        )
