"""Predict the time of a step of nanotron, as the playbook ran it: its profile, its stages, the benchmark's stalls."""

import math
from dataclasses import dataclass, replace

from scripts.validation.nanotron import nanotron_breakdown, usable_bytes
from scripts.validation.nanotron import stages as cut_by_cost
from ultrascale_jax.plan.formulas.framework import FrameworkProfile
from ultrascale_jax.plan.formulas.step_time import Step
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.workload import Group, Run


@dataclass(frozen=True, kw_only=True)
class NanotronProfile(FrameworkProfile):
    """Constants of nanotron beyond those of every framework."""

    host_rank_s: float
    """More of `host_s` for each rank of the tensor group, where a pipeline runs over several nodes."""
    tensor: float
    """Share of the tensor group's communication in a node that is waited for."""
    reduce: float
    """Time of reducing the gradients of a step over that of `costs.collective_seconds`."""
    gather: float
    """By how much each further node lengthens the gathering of updated parameters (ZeRO-1)."""
    send_s: float
    """Handing over to the next stage of a pipeline, beside the bytes."""
    stall_s: float
    """Of a micro-batch for each neighbour in the pipeline, when a step stalls."""
    network_stall_s: float
    """Of a micro-batch without a pipeline, when a step stalls."""


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
    send_s=0.08e-3,
    step_s=0.029,
    stall_s=0.46,
    network_stall_s=0.965,
)
"""nanotron v0.5 as the playbook ran it. Flash attention 2 has 0.53 of cuDNN's speed forward (FlashAttention-3's paper)
and 0.7 of Mosaic's backward. Eager PyTorch makes 50 passes of d_model and 14 of d_ff (norms 14, residual sums 12,
rotary embeddings 8, splitting and joining queries, keys and values 12, of gathered inputs 4; silu and product apart)
and gathers the inputs of products again for the backward pass. The other constants are `benchmark.calibrate` of the
benchmark's calibration half, rounded."""


class NanotronStep(Step):
    """One step of nanotron: stages are cut by cost and run 1F1B as separate programs; the last backward pass reduces.

    It reduces a tensor at a time, and hides that behind the share `hide` of itself.
    """

    def __init__(self, run: Run, cluster: Cluster, profile: NanotronProfile = NANOTRON):
        super().__init__(run, cluster, profile)
        self.constants = profile
        if run.mesh.pp > 1 and cluster.nodes > 1 and self.tensor.ranks > 1:
            host_s = profile.host_s + profile.host_rank_s * self.tensor.ranks
            self.profile = replace(profile, host_s=host_s)

    def parts(self) -> dict[str, float]:
        """Return the seconds of a step, part by part."""
        m, pp = self.run.microbatches, self.mesh.pp
        layer, head, loss = self.layer(), self.head(), self.loss()
        stages: list[tuple[float, float, float]] = [(self.run.rank_layers, 1.0, 1.0)]
        if pp > 1:
            stages = [(s.layers, s.head, s.loss) for s in cut_by_cost(self.shape, pp)]
        layer_s, head_s = sum(layer.values()), sum(head.values())
        times = [n * layer_s + h * head_s + e * loss for n, h, e in stages]
        busiest = max(times)
        layers, heads, losses = stages[times.index(busiest)]
        slowest = max(busiest, self.logits(stages))
        parts = {name: m * layers * seconds for name, seconds in layer.items()}
        for name, seconds in head.items():
            parts[name] = parts.get(name, 0.0) + m * heads * seconds
        parts["loss"] = m * losses * loss
        if pp > 1:
            parts["bubble"] = sum(times) - busiest
            parts["exposed pp"] = 2 * (m + pp - 1) * self.hand_over() + m * (slowest - busiest)
        once = self.once_a_step(self.shape.num_layers / pp, self.profile.hide * slowest * 2 / 3)
        for name, seconds in once.items():
            parts[name] = parts.get(name, 0.0) + seconds
        return parts | {"step overhead": self.profile.step_s}

    def logits(self, stages: list[tuple[float, float, float]]) -> float:
        """Return the seconds to send one micro-batch's logits, if the loss is on another stage than the head."""
        if all(head == loss for _, head, loss in stages):
            return 0.0
        size = 2 * self.run.tokens * self.shape.vocab_size / self.tensor.ranks
        return self.collective("collective-permute", size, self.group("pp"))

    @property
    def passes_overlap(self) -> bool:
        """Return false: no program has both passes."""
        return False

    def tensor_group(self) -> float:
        """Return the exposed share of the tensor group's communication."""
        return super().tensor_group() * (self.constants.tensor if self.tensor.nodes == 1 else 1.0)

    def hand_over(self) -> float:
        """Return the seconds to send activations to the next stage."""
        return self.constants.send_s + super().hand_over()

    def summed(self, kind: str, size: float, ranks: Group) -> float:
        """Return the seconds to reduce a step's gradients over `ranks`, one tensor at a time."""
        pieces = 4 * self.shape.num_layers // self.mesh.pp + 1
        return self.constants.reduce * pieces * self.collective(kind, size / pieces, ranks)

    def gathered(self, size: float, ranks: Group) -> float:
        """Return the seconds to gather updated parameters over `ranks`, slower over more nodes."""
        return super().gathered(size, ranks) * (1 + self.constants.gather * (ranks.nodes - 1))


def stall_s(run: Run, profile: NanotronProfile = NANOTRON) -> float:
    """Return the seconds that a stalled step takes more."""
    m, pp = run.microbatches, run.mesh.pp
    if pp == 1:
        return m * profile.network_stall_s
    return (m + pp - 1) * min(pp - 1, 2) * profile.stall_s


def estimate_with_stalls(
    run: Run, cluster: Cluster, profile: NanotronProfile = NANOTRON
) -> StepPrediction:
    """Predict a step between one that ran and one that stalled, nearer to the likelier."""
    memory = nanotron_breakdown(run).peak_bytes
    ran = NanotronStep(run, cluster, profile).predict(memory)
    stalled = (1 + stall_s(run, profile) / ran.step_s) ** benchmark_stalls(run, cluster)
    stalls = ran.step_s * (stalled - 1)
    return replace(ran, step_s=ran.step_s + stalls, parts={**ran.parts, "stalls": stalls})


def benchmark_stalls(run: Run, cluster: Cluster) -> float:
    """Return the probability that a step of the playbook's benchmark stalled.

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
