"""The playbook's cheat-sheet for one model on one cluster: what each axis splits, sends, and whether that can hide.

The formulas are the playbook's, with the model's real sizes instead of 16 h^2 and the GPU's dense peak and the
links' bandwidths as the data sheets have them: a lower bound for both sides, without latencies. In texts, N parameters
and L layers of one GPU before ZeRO, n the axis, B the bytes a second of its link, F the GPU's FLOP/s, T the tokens of a
micro-batch on one GPU.
"""

import dataclasses
from dataclasses import dataclass

from ultrascale_jax.config import Experts, MeshConfig
from ultrascale_jax.plan.formulas.costs import ring_bytes
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Run, group

BATCH, SHARE = "n x micro-batch x accumulation", "1/n of the batch"

TEXTS = {
    "DP": ("dp", BATCH, "all on each GPU", SHARE, "F/BT x (n-1)/n"),
    "ZeRO-1": ("fsdp", BATCH, "optimizer / n", SHARE, "F/BT x (n-1)/n"),
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
    """Of the mesh."""
    size: int
    """Of the axis in the run; where it is not used there, one that the cluster suggests."""
    used: bool
    """Whether the run uses it."""
    batch: str
    memory: str
    compute: str
    communication: str
    """Formula of communication over computation."""
    volume: float
    """Bytes that one GPU sends in a step."""
    communication_s: float
    """Of one micro-batch, and for dp and ZeRO-1 of the step."""
    computation_s: float
    """Of the computation that it can hide behind."""

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

    A ring over nodes uses a network card for each of its ranks there. `pp` and `cp` send to a neighbour and `ep` from
    everyone to everyone, each GPU by its own card. A batch axis that the mesh has not would take the place of the one
    that it has.
    """
    absent = axis in ("dp", "fsdp") and mesh.sizes[axis] == 1
    instead = {"dp": 1, "fsdp": 1} if absent else {}
    changed = dataclasses.replace(mesh, **(instead | {axis: size}))
    ranks = group(changed, (axis,), cluster.gpus_per_node)
    if ranks.nodes == 1:
        return cluster.intra_gbs * 1e9
    cards = 1 if axis in ("pp", "cp", "ep") else ranks.per_node
    return min(cluster.intra_gbs, cluster.inter_gbs * cards) * 1e9


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
        """Compare `sent` bytes of communication, `times` as many in a step, with `work` FLOPs."""
        axis, batch, memory, compute, communication = TEXTS[strategy]
        stages = "DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"
        other_stage = axis == "fsdp" and strategy != stages[self.run.zero]
        return Row(
            strategy=strategy,
            axis=axis,
            size=size,
            used=self.mesh.sizes[axis] > 1 and not other_stage,
            batch=batch,
            memory=memory,
            compute=compute,
            communication=communication,
            volume=sent * times,
            communication_s=sent / bandwidth(self.mesh, axis, size, self.cluster),
            computation_s=work / self.flops,
        )

    def data(self) -> list[Row]:
        """Compare gradients, and with ZeRO-3 parameters, in bfloat16 with the passes of a micro-batch."""
        mesh, m, backward = self.mesh, self.run.microbatches, 4 * self.tokens * self.active
        others = mesh.tensor * mesh.cp * mesh.pp * mesh.ep
        rest = max(mesh.dp, mesh.fsdp)
        rest = rest if rest > 1 else self.cluster.num_gpus // others
        dp, fsdp = self.size("dp", rest), self.size("fsdp", rest)
        whole, shard = (ring_bytes("all-gather", 2 * self.params, n) for n in (dp, fsdp))
        return [
            self.row("DP", dp, 2 * whole, 1, backward),
            self.row("ZeRO-1", fsdp, 2 * shard, 1, backward),
            self.row("ZeRO-2", fsdp, shard, m + 1, backward),
            self.row("ZeRO-3", fsdp, 3 * shard, m, 1.5 * backward),
        ]

    def tensor(self) -> list[Row]:
        """Compare four collectives of the hidden states in the forward pass of a layer with its products."""
        whole, rows = self.mesh.tensor, []
        node = max(2, self.cluster.gpus_per_node // whole)
        layer = self.shape.attention_params + self.shape.mlp_params
        times = 2 * self.layers * self.run.microbatches
        for strategy in ("TP", "TP + SP"):
            axis = TEXTS[strategy][0]
            n = self.size(axis, node)
            group_size = whole if self.mesh.sizes[axis] > 1 else whole * n
            sent = 4 * ring_bytes("all-gather", 2 * self.tokens * self.shape.d_model, n)
            rows.append(self.row(strategy, n, sent, times, 2 * self.tokens * layer / group_size))
        return rows

    def context(self) -> Row:
        """Compare a neighbour's keys and values with attention's forward pass; backward moves twice as many bytes."""
        n = self.size("cp", self.cluster.gpus_per_node)
        tokens = self.run.sequences * self.run.seq_len / n
        heads = self.shape.head_dim / self.mesh.tensor
        step = 4 * tokens * self.shape.num_kv_heads * heads
        scores = 2 * tokens * self.run.seq_len / n * self.shape.num_heads * heads
        times = 3 * self.layers * self.run.microbatches
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
