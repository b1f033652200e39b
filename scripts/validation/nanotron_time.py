"""How long a step of nanotron takes, as the playbook ran it: its profile, its stages, and the benchmark's stalls."""

import math
from dataclasses import dataclass, replace

from scripts.validation.nanotron import nanotron_breakdown, stages, usable_bytes
from ultrascale_jax.plan.formulas.framework import FrameworkProfile
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.training.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class NanotronProfile(FrameworkProfile):
    """Constants of nanotron; beyond those of every framework, what a stalled step adds."""

    stall_s: float
    """Of a micro-batch for each neighbour in the pipeline."""
    network_stall_s: float
    """Of a micro-batch without a pipeline."""


def cut(shape: ModelShape, num_stages: int) -> list[tuple[float, float, float]]:
    """Layers, head and loss of every stage, cut by cost."""
    return [(stage.layers, stage.head, stage.loss) for stage in stages(shape, num_stages)]


NANOTRON = NanotronProfile(
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
    cut=cut,
    stall_s=0.46,
    network_stall_s=0.965,
)
"""nanotron v0.5 as the playbook ran it. Flash attention 2 has 0.53 of cuDNN's speed forward (FlashAttention-3's paper)
and 0.7 of Mosaic's backward. Eager PyTorch makes 50 passes of d_model and 14 of d_ff (norms 14, residual sums 12,
rotary embeddings 8, splitting and joining queries, keys and values 12, of gathered inputs 4; silu and product apart)
and gathers the inputs of products again for the backward pass. The other constants are `benchmark.calibrate` of the
benchmark's calibration half, rounded."""


def stall_s(run: Run, profile: NanotronProfile = NANOTRON) -> float:
    """Seconds that a stalled step takes more."""
    m, pp = run.microbatches, run.mesh.pp
    if pp == 1:
        return m * profile.network_stall_s
    return (m + pp - 1) * min(pp - 1, 2) * profile.stall_s


def estimate_with_stalls(
    run: Run, cluster: Cluster, profile: NanotronProfile = NANOTRON
) -> StepPrediction:
    """Predict a step between one that ran and one that stalled, nearer to the likelier."""
    memory = nanotron_breakdown(run).peak_bytes
    ran = estimate(run, cluster, profile, peak_bytes=memory)
    stalled = (1 + stall_s(run, profile) / ran.step_s) ** benchmark_stalls(run, cluster)
    stalls = ran.step_s * (stalled - 1)
    return replace(ran, step_s=ran.step_s + stalls, parts={**ran.parts, "stalls": stalls})


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
    usable = usable_bytes(cluster.gpu)
    full = nanotron_breakdown(run).peak_bytes / usable
    return max(risk, 1 / (1 + math.exp(min(50.0, (0.885 - full) / 0.01))))
