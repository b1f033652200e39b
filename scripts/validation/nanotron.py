"""Predict memory and step time of nanotron, as the playbook ran it: models, runs, stages, stalls.

The tensors that nanotron keeps were read off its source (github.com/huggingface/nanotron: `models/llama.py`,
`models/base.py`, `optim/`, `parallel/`; perhaps not the benchmark's own version). The constants were fitted on half of
`tests/data/plan/playbook_runs.csv`; which constants there are was chosen by looking at all of it. The benchmark records
`torch.cuda.max_memory_reserved()` of rank 0, which is on the first stage of a pipeline.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs.shapes import PLAYBOOK
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.framework import Overheads
from ultrascale_jax.plan.formulas.layer_time import Gives, LayerTime, Product
from ultrascale_jax.plan.formulas.step_time import Step
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.workload import Group, Run
from ultrascale_jax.units import GIB

SEQ_LEN = 4096
"""Sequence length of every run of the benchmark, in tokens."""

CONTEXT_BYTES = int(1.5 * GIB)
"""Memory that PyTorch cannot reserve: CUDA's context and NCCL (1 to 2 GB); the fullest run reserved 77.4 GiB."""


def run_of(row: Mapping[str, str]) -> Run:
    """Return the run of a row of `playbook_runs.csv` (TP with sequence parallelism, 1F1B)."""
    zero = 1 if int(row["zero"]) else 0
    replicas = {"fsdp" if zero else "dp": int(row["dp"])}
    mesh = MeshConfig(**({"fsdp": 1} | replicas), pp=int(row["pp"]), sp=int(row["tp"]))
    return Run(
        shape=ModelShape.of(PLAYBOOK[row["model"]]),
        mesh=mesh,
        seq_len=SEQ_LEN,
        sequences=int(row["mbs"]),
        microbatches=int(row["gas"]),
        zero=zero,
        schedule="1f1b",
    )


def is_calibration(row: Mapping[str, str]) -> bool:
    """Return whether a row, of 1B or 8B, is of the half that constants are fitted on; equal rows are on one side."""
    if row["model"] not in ("1B", "8B"):
        return False
    names = ("model", "nodes", "mbs", "gas", "dp", "pp", "tp", "zero")
    return zlib.crc32(" ".join(str(row[name]) for name in names).encode()) % 2 == 0


class Stage(NamedTuple):
    """How many layers one pipeline rank has, and which other blocks (0 or 1)."""

    embedding: int
    layers: int
    head: int
    loss: int


def stages(shape: ModelShape, num_stages: int) -> list[Stage]:
    """Cut the model as nanotron does (`models/base.py`, `build_model`): a stage ends where it exceeds its share.

    The costs are the parameters of a layer and of the head; embedding, norm, cast and loss are free.
    """
    layer = shape.attention_params + shape.mlp_params
    head = shape.vocab_size * shape.d_model
    blocks = [("embedding", 0), *[("layers", layer)] * shape.num_layers]
    blocks += [("norm", 0), ("head", head), ("cast", 0), ("loss", 0)]
    share = (shape.num_layers * layer + head) / num_stages
    names_by_rank: list[list[str]] = [[] for _ in range(num_stages)]
    rank = cost = 0
    for name, block_cost in blocks:
        cost += block_cost
        names_by_rank[rank].append(name)
        if cost > share * (rank + 1) and rank < num_stages - 1:
            rank += 1
    return [Stage(*map(names.count, Stage._fields)) for names in names_by_rank]


class Allocator(NamedTuple):
    """Constants of the memory that PyTorch's caching allocator reserves for the bytes needed."""

    fixed: float
    """GiB that every run has: workspaces, small tensors."""
    activations: float
    """Reserved over needed bytes of activations; the surplus includes fragmentation, which was not isolated."""
    logit: float
    """Bytes of one logit: bfloat16, float32 and softmax in float32 are 10."""
    hidden: float
    """Bytes of one value of a micro-batch's unsharded hidden state, under TP: gathered and to be scattered."""
    queue: float
    """As `hidden`, of several micro-batches without a pipeline: perhaps Python frees tensors that NCCL still reads."""


FITTED = Allocator(fixed=0.135, activations=1.161, logit=9.10, hidden=6.52, queue=94.9)
"""Least squares of the calibration rows."""


def reserved_bytes(run: Run, *, stage: int | None = None, allocator: Allocator = FITTED) -> float:
    """Predict the memory that PyTorch reserves on one GPU of a pipeline stage; None: the stage that needs most.

    A recorded figure is stage 0's.
    """
    cut = stages(run.shape, run.mesh.pp)
    ranks = range(run.mesh.pp) if stage is None else [stage]
    return max(_stage_bytes(run, cut[rank], rank, allocator) for rank in ranks)


def usable_bytes(gpu: Gpu) -> int:
    """Return the bytes of a GPU that PyTorch can reserve; `reserved_bytes` includes fragmentation."""
    return int(gpu.memory_gib * GIB) - CONTEXT_BYTES


def least_bytes(run: Run) -> float:
    """Return a lower bound without fitted constants: weights, optimizer, saved activations, float32 logits twice."""
    return reserved_bytes(run, allocator=Allocator(0, 1, 8, 0, 0))


def _stage_bytes(run: Run, stage: Stage, rank: int, allocator: Allocator) -> float:
    """Count weights in bfloat16, gradients in bfloat16 and float32, master weights and moments sharded by ZeRO-1.

    A layer keeps inputs and results of both norms, queries, keys, values and attention's result, and of the gated
    feed-forward layer the joint gate and up, silu and product: `models/llama.py`.
    """
    shape, mesh = run.shape, run.mesh
    table = shape.vocab_size * shape.d_model
    tables = (
        max(stage.embedding, stage.head) if shape.tied_embeddings else stage.embedding + stage.head
    )
    layer = shape.attention_params + shape.mlp_params
    n = (stage.layers * layer + tables * table) / mesh.tensor
    state = 2 * n + 2 * n + 4 * n  # weights, gradients and their sums
    state += (4 + 8) * n / (run.shards if run.zero else 1)  # master weights, moments

    tokens = run.sequences * run.seq_len
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    width = 4 * shape.d_model + heads + 4 * shape.d_ff  # norms, attention, feed-forward
    activations = (
        2 * stage.layers * tokens / mesh.tensor * width * min(run.microbatches, mesh.pp - rank)
    )
    hidden = tokens * shape.d_model if mesh.tensor > 1 else 0
    queued = hidden if mesh.pp == 1 and run.microbatches > 1 else 0
    logits = tokens * shape.vocab_size / mesh.tensor if stage.head or stage.loss else 0
    return (
        state
        + allocator.activations * activations
        + allocator.logit * logits
        + allocator.hidden * hidden
        + allocator.queue * queued
        + allocator.fixed * GIB
    )


OVERHEADS = Overheads(
    passes=35, logit_bytes=61, host_s=4.06e-3, tensor_passes=10, hide=0.18, step_s=0.029
)
"""nanotron v0.5 as the playbook ran it, by a fit of the benchmark's calibration half, rounded, as the constants below.
Eager PyTorch makes 50 passes of d_model and 14 of d_ff (norms 14, residual sums 12, rotary embeddings 8, splitting and
joining queries, keys and values 12, of gathered inputs 4; silu and product apart) and gathers the inputs of products
again for the backward pass."""

ATTENTION = 0.66
"""Speed of attention over that of `costs.attention_seconds`: Flash attention 2 has 0.53 of cuDNN's forward
(FlashAttention-3's paper)."""
PRODUCT = 0.80
"""Speed of products over that of `costs.gemm_seconds`."""
HOST_RANK_S = 2.26e-3
"""More of `host_s` for each rank of the tensor group, where a pipeline runs over several nodes."""
TENSOR = 0.89
"""Share of the tensor group's communication in a node that is waited for."""
REDUCE = 0.435
"""Time of reducing the gradients of a step over that of `costs.collective_seconds`."""
GATHER = 0.152
"""By how much each further node lengthens the gathering of updated parameters (ZeRO-1)."""
SEND_S = 0.08e-3
"""Latency of a transfer to the next stage of a pipeline, without its bytes."""
STALL_S, NETWORK_STALL_S = 0.46, 0.965
"""Delay of a micro-batch in a step that stalls: for each neighbour in the pipeline, and without a pipeline."""


class NanotronLayer(LayerTime):
    """The arithmetic of a layer of nanotron."""

    overheads = OVERHEADS

    def attention(self) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass."""
        forward, backward = super().attention()
        return forward / ATTENTION, backward / ATTENTION

    def gemms(self, shapes: list[Product], gives: Gives, *, fp8: bool = True) -> float:
        """Return the seconds of the products of a pass."""
        return super().gemms(shapes, gives, fp8=fp8) / PRODUCT


class NanotronStep(Step):
    """One step of nanotron: stages are cut by cost and run 1F1B as separate programs; the last backward pass reduces.

    It reduces a tensor at a time, and overlaps it with the share `hide` of itself.
    """

    def __init__(self, run: Run, cluster: Cluster):
        super().__init__(run, cluster)
        self.overheads = OVERHEADS
        self.layer_time = NanotronLayer(run, cluster)
        self.passes = self.layer_time.passes
        if run.mesh.pp > 1 and cluster.nodes > 1 and self.tensor.ranks > 1:
            host_s = self.overheads.host_s + HOST_RANK_S * self.tensor.ranks
            self.overheads = replace(self.overheads, host_s=host_s)

    def parts(self) -> dict[str, float]:
        """Return the seconds of a step, part by part."""
        m, pp = self.run.microbatches, self.mesh.pp
        layer, head, loss = self.layer(), self.head(), self.loss()
        cut: list[tuple[float, float, float]] = [(self.run.rank_layers, 1.0, 1.0)]
        if pp > 1:
            cut = [(s.layers, s.head, s.loss) for s in stages(self.shape, pp)]
        layer_s, head_s = sum(layer.values()), sum(head.values())
        times = [n * layer_s + h * head_s + e * loss for n, h, e in cut]
        busiest = max(times)
        layers, heads, losses = cut[times.index(busiest)]
        slowest = max(busiest, self.logits(cut))
        parts = {name: m * layers * seconds for name, seconds in layer.items()}
        for name, seconds in head.items():
            parts[name] = parts.get(name, 0.0) + m * heads * seconds
        parts["loss"] = m * losses * loss
        if pp > 1:
            parts["bubble"] = sum(times) - busiest
            parts["exposed pp"] = 2 * (m + pp - 1) * self.hand_over() + m * (slowest - busiest)
        once = self.once_a_step(self.shape.num_layers / pp, self.overheads.hide * slowest * 2 / 3)
        for name, seconds in once.items():
            parts[name] = parts.get(name, 0.0) + seconds
        return parts | {"step overhead": self.overheads.step_s}

    def loss(self) -> float:
        """Return the seconds of the cross-entropy of one micro-batch, whose logits are not sharded."""
        logits = self.run.tokens * self.shape.vocab_size / self.tensor.ranks
        return costs.memory_seconds(self.gpu, logits * self.overheads.logit_bytes)

    def logits(self, cut: list[tuple[float, float, float]]) -> float:
        """Return the seconds to send one micro-batch's logits, if the loss is on another stage than the head."""
        if all(head == loss for _, head, loss in cut):
            return 0.0
        size = 2 * self.run.tokens * self.shape.vocab_size / self.tensor.ranks
        return self.collective("collective-permute", size, self.group("pp"))

    @property
    def passes_overlap(self) -> bool:
        """Return false: no program has both passes."""
        return False

    def tensor_group(self) -> float:
        """Return the exposed share of the tensor group's communication."""
        return super().tensor_group() * (TENSOR if self.tensor.nodes == 1 else 1.0)

    def hand_over(self) -> float:
        """Return the seconds to send activations to the next stage."""
        return SEND_S + super().hand_over()

    def summed(self, kind: str, size: float, ranks: Group) -> float:
        """Return the seconds to reduce a step's gradients over `ranks`, one tensor at a time."""
        pieces = 4 * self.shape.num_layers // self.mesh.pp + 1
        return REDUCE * pieces * self.collective(kind, size / pieces, ranks)

    def gathered(self, size: float, ranks: Group) -> float:
        """Return the seconds to gather updated parameters over `ranks`, slower over more nodes."""
        return super().gathered(size, ranks) * (1 + GATHER * (ranks.nodes - 1))


def stall_s(run: Run) -> float:
    """Return the seconds that a stalled step takes more."""
    m, pp = run.microbatches, run.mesh.pp
    if pp == 1:
        return m * NETWORK_STALL_S
    return (m + pp - 1) * min(pp - 1, 2) * STALL_S


def estimate_with_stalls(run: Run, cluster: Cluster) -> StepPrediction:
    """Predict a step between one that ran and one that stalled, nearer to the likelier."""
    memory = int(reserved_bytes(run))
    ran = NanotronStep(run, cluster).predict(memory)
    stalled = (1 + stall_s(run) / ran.step_s) ** benchmark_stalls(run, cluster)
    stalls = ran.step_s * (stalled - 1)
    return replace(ran, step_s=ran.step_s + stalls, parts={**ran.parts, "stalls": stalls})


def benchmark_stalls(run: Run, cluster: Cluster) -> float:
    """Return the probability that a step of the playbook's benchmark stalled.

    A stalled run takes some 0.5 s more for each micro-batch and neighbour in the pipeline, whatever its model,
    micro-batch or tensor group; on 64 nodes 1 s for each micro-batch without a pipeline. Rows of the calibration half
    that are nearer to a stalled step than to one that ran: 10 of 191 pipelines on up to 16 nodes, 33 of 63 on 32, 41 of
    41 on 64; 9 of 20 rows without a pipeline on 64. Apart from these: all 9 with ZeRO-0 and 16 or more micro-batches
    on 8 nodes or more, none of 5 on fewer; all 45 with a tensor group of 32; all 4 with less than a tenth of the memory
    to spare, where PyTorch frees and allocates for every micro-batch. Why the others stalled is not known.
    """
    mesh, nodes = run.mesh, cluster.nodes
    risk = min(1.0, max(0.0, math.log2(nodes / 16) / 2))
    if mesh.pp == 1:
        return max(0.0, risk - 0.5)
    replicated = run.zero == 0 and mesh.dp > 1 and run.microbatches >= 16
    if (replicated and nodes >= 8) or (mesh.tensor > 16 and nodes > 1):
        return 1.0
    usable = usable_bytes(cluster.gpu)
    full = reserved_bytes(run) / usable
    return max(risk, 1 / (1 + math.exp(min(50.0, (0.885 - full) / 0.01))))
