"""What the trainer's software adds to what the machine does: this project's, and the playbook's benchmark."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ultrascale_jax.config import REMAT_NAMES
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.validation import nanotron
from ultrascale_jax.plan.workload import Run

RESULTS = {
    "qkv": ("q", "k", "v"),
    "out": ("attn_out",),
    "up": ("gate", "up"),
    "routed up": ("gate", "up"),
}
"""Matrix products of a layer and the names that `train.remat` has for their results."""

KEPT = {"selective": (REMAT_NAMES,), "dots": (*RESULTS.values(),), "full": ((),)}
"""What the policies of `train_step/remat.py` keep."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Constants of `step_time.estimate` that depend on the program and not on the machine."""

    matmul: float = 1.0
    """Speed of matrix products within a step over that of `costs.gemm_seconds`."""
    attention: float = 1.0
    """Speed of attention over that of `costs.attention_seconds`."""
    passes: float
    """How often a layer reads or writes a bfloat16 vector of d_model + d_ff / 2 for each token, forward and backward,
    beside its matrix products and attention."""
    logit_bytes: float
    """Memory traffic of the loss for each logit, forward and backward, beside its matrix products."""
    host_s: float
    """Least time of a layer, forward and backward: kernel launches of the host."""
    host_rank_s: float = 0.0
    """More of that for each rank of the tensor group, where a pipeline runs over several nodes."""
    tensor: float = 1.0
    """Share of the tensor group's communication that is waited for."""
    tensor_passes: int = 8
    """How often a layer gathers or scatters the residual stream, forward and backward."""
    gathers: int = 1
    """Collectives in which a layer's parameters are gathered (ZeRO-3)."""
    travel: float = 1.0
    """Share of the time of tokens on their way to experts and back that is waited for."""
    overlapped: float = 1.0
    """The same where half of them travel while experts work on the other half."""
    hide: float
    """Share of the arithmetic beside it that communication of parameters and gradients can hide behind."""
    reduce: float = 1.0
    """Time of reducing the gradients of a step over that of `costs.collective_seconds`."""
    gather: float = 0.0
    """By how much each further node lengthens the gathering of updated parameters (ZeRO-1 and 2)."""
    reduce_in_backward: bool = False
    """Gradients are reduced during the last backward pass, a tensor at a time; else after it, all together."""
    send_s: float = 0.0
    """Handing over to the next stage of a pipeline, beside the bytes."""
    step_s: float
    """Once a step: optimizer launches, data, logging."""
    by_cost: bool = False
    """Stages of a pipeline are cut by cost (`nanotron.stages`); else equal, embedding and head split over all."""
    stall_s: float = 0.0
    """Of a micro-batch for each neighbour in the pipeline, when a step stalls."""
    network_stall_s: float = 0.0
    """Of a micro-batch without a pipeline, when a step stalls."""
    stall_risk: Callable[[Run, Cluster], float] | None = None
    """How likely a step of the run stalls; none is never."""


ULTRASCALE = FrameworkProfile(
    passes=19,
    logit_bytes=14,
    host_s=0.35e-3,
    gathers=6,
    travel=0.85,
    overlapped=0.7,
    hide=0.9,
    step_s=5e-3,
)
"""This project: what XLA makes of it. A layer's passes are 25 of d_model and 8 of d_ff, counted in the fusions that XLA
0.12 compiles for H100 (two norms 14, residual sums 6, rotary embeddings 5; gated unit 3 forward, 5 backward). The loss
makes its logits in chunks and visits them in float32 and bfloat16 (models/loss.py). A layer is some 90 kernels of 4
microseconds (XLA's own launch estimate). Its matrices are gathered one by one, those of keys and values together. Of
the way of tokens to their experts XLA's schedules hide a seventh, or a third (docs/planning/experts.csv). What else
hides and what a step adds (`hide`, `step_s`) are estimates."""


def benchmark_stalls(run: Run, cluster: Cluster) -> float:
    """How likely a step of the playbook's benchmark stalled.

    A stalled run takes some 0.5 s more for each micro-batch and neighbour in the pipeline, whatever its model,
    micro-batch or tensor group; on 64 nodes 1 s for each micro-batch without a pipeline. Of the calibration half, where
    a row is nearer to a stalled step than to one that ran: 10 of 191 pipelines on up to 16 nodes, 33 of 63 on 32, 41 of
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
    usable = nanotron.usable_bytes(cluster.gpu)
    full = nanotron.nanotron_breakdown(run).peak_bytes / usable
    return max(risk, 1 / (1 + math.exp(min(50.0, (0.885 - full) / 0.01))))


NANOTRON = FrameworkProfile(
    attention=0.66,
    passes=35,
    logit_bytes=61,
    host_s=4.06e-3,
    host_rank_s=2.26e-3,
    tensor=0.89,
    tensor_passes=10,
    hide=0.18,
    reduce=0.435,
    gather=0.152,
    reduce_in_backward=True,
    send_s=0.08e-3,
    step_s=0.029,
    by_cost=True,
    stall_s=0.46,
    network_stall_s=0.965,
    stall_risk=benchmark_stalls,
)
"""nanotron v0.5 as the playbook ran it. Flash attention 2 has 0.53 of cuDNN's speed forward (FlashAttention-3's paper)
and 0.7 of Mosaic's backward. Eager PyTorch makes 50 passes of d_model and 14 of d_ff (norms 14, residual sums 12,
rotary embeddings 8, splitting and joining queries, keys and values 12, of gathered inputs 4; silu and product apart)
and gathers the inputs of products again for the backward pass. The other constants are `validate.calibrate` of the
benchmark's calibration half, rounded."""
