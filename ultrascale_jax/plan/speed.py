"""How long one step takes, from formulas; no JAX.

A step is its micro-batches on the slowest stage of the pipeline, the bubble, the communication that arithmetic does not
hide, and the optimizer. The machine is in `hardware.py` and `costs.py`, what the trainer adds in `software.py`.
"""

import math
from dataclasses import dataclass

from ultrascale_jax.config import TrainConfig
from ultrascale_jax.plan import costs, nanotron
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.software import KEPT, RESULTS, ULTRASCALE, Software
from ultrascale_jax.plan.workload import Group, Run, group
from ultrascale_jax.training.flops import attention_flops_per_token


@dataclass(frozen=True)
class Estimate:
    """One optimizer step."""

    step_s: float
    """Seconds."""
    tokens_per_s_gpu: float
    """Tokens that one GPU trains on in a second."""
    mfu: float
    """Model FLOPs utilisation as `training/flops.py` counts it: causal attention halved, recomputation not counted."""
    parts: dict[str, float]
    """What takes how many seconds; together `step_s`."""


def bubble_share(schedule: str, virtual_stages: int) -> float:
    """Bubble over that of 1F1B, p - 1 micro-batches (playbook, chapter Pipeline Parallelism; arXiv 2401.10241)."""
    shares = {"zb_uniform": 2 / 3, "zb_h1": 1 / 3, "zb_v": 1 / 6, "dualpipe_v": 1 / 6}
    share = shares.get(schedule, 1.0)
    return share / virtual_stages if schedule in ("interleaved", "zb_uniform") else share


def estimate(run: Run, cluster: Cluster, software: Software = ULTRASCALE) -> Estimate:
    """One step of `run` on `cluster` by `software`."""
    step = Step(run, cluster, software)
    parts = step.parts()
    seconds = sum(parts.values())
    if software.stall_risk is not None and (risk := software.stall_risk(run, cluster)):
        # Between a step that ran and one that stalled, nearer to the likelier.
        parts["stalls"] = seconds * ((1 + step.stall() / seconds) ** risk - 1)
        seconds += parts["stalls"]
    speed = run.step_tokens / seconds / run.num_gpus
    peak = costs.peak_flops(cluster.gpu, "bf16")
    mfu = speed * run.shape.flops_per_token(run.seq_len) / peak
    return Estimate(seconds, speed, mfu, {name: s for name, s in parts.items() if s > 0})


type Product = tuple[float, float, float, float]
"""Rows, columns and contracted dim of a matrix product, and how many of it."""


class Step:
    """The terms of one step on one GPU, in seconds."""

    def __init__(self, run: Run, cluster: Cluster, software: Software):
        self.run, self.cluster, self.software = run, cluster, software
        self.shape, self.mesh, self.gpu = run.shape, run.mesh, cluster.gpu
        self.tensor = self.group("sp", "tp")
        self.tensor_axes = "exposed " + (
            "*".join(a for a in ("sp", "tp") if run.mesh.sizes[a] > 1) or "sp"
        )
        self.shards = self.group("fsdp", "ep", "cp")

    def parts(self) -> dict[str, float]:
        """The whole step by what takes it."""
        m, pp = self.run.micro_batches, self.mesh.pp
        layer, head, loss = self.layer(), self.head(), self.loss()
        layer_s, head_s = sum(layer.values()), sum(head.values())
        stages = self.stages()
        times = [n * layer_s + h * head_s + e * loss for n, h, e in stages]
        busiest = max(times)
        layers, heads, losses = stages[times.index(busiest)]
        slowest = max(busiest, self.logits(stages))
        parts = {name: m * layers * seconds for name, seconds in layer.items()}
        for name, seconds in head.items():
            parts[name] = parts.get(name, 0.0) + m * heads * seconds
        parts["loss"] = m * losses * loss
        if pp > 1:
            share = bubble_share(self.run.schedule, self.run.virtual_stages)
            parts["bubble"] = share * (sum(times) - busiest)
            transfers = 2 * (m + pp - 1) * self.run.virtual_stages * self.hand_over()
            parts["exposed pp"] = transfers + m * (slowest - busiest)
        for name, seconds in self.once_a_step(slowest).items():
            parts[name] = parts.get(name, 0.0) + seconds
        return parts | {"step overhead": self.software.step_s}

    def stall(self) -> float:
        """What a stalled step takes more."""
        m, pp = self.run.micro_batches, self.mesh.pp
        if pp == 1:
            return m * self.software.network_stall_s
        return (m + pp - 1) * min(pp - 1, 2) * self.software.stall_s

    def stages(self) -> list[tuple[float, float, float]]:
        """Layers, and shares of head and loss, of every stage."""
        pp = self.mesh.pp
        if self.software.by_cost and pp > 1:
            return [(s.layers, s.head, s.loss) for s in nanotron.stages(self.shape, pp)]
        return [(math.ceil(self.shape.num_layers / pp), 1 / pp, 1 / pp)] * pp

    def logits(self, stages: list[tuple[float, float, float]]) -> float:
        """Sending the logits of one micro-batch where the loss is on another stage than the head."""
        if all(head == loss for _, head, loss in stages):
            return 0.0
        size = 2 * self.run.tokens * self.shape.vocab_size / self.tensor.ranks
        return self.collective("collective-permute", size, self.group("pp"))

    def layer(self) -> dict[str, float]:
        """Forward and backward pass of one micro-batch through one layer."""
        products = self.products()
        forward = {name: self.gemms(shapes, backward=False) for name, shapes in products.items()}
        backward = sum(self.gemms(shapes, backward=True) for shapes in products.values())
        attention, attention_backward = self.attention()
        passes = self.passes()
        repeated = self.recomputed(forward, attention, passes / 3)
        forward_s = sum(forward.values()) + attention + passes / 3
        backward_s = backward + attention_backward + passes * 2 / 3 + repeated
        parts = {
            "matrix products": sum(forward.values()) + backward,
            "attention": attention + attention_backward,
            "memory traffic": passes + self.accumulation(self.layer_params()),
            "recomputation": repeated,
            self.tensor_axes: self.tensor_group(),
            "exposed cp": self.ring(attention),
            "exposed ep": self.experts(),
            "exposed fsdp": self.parameters(self.layer_params(), forward_s, backward_s),
            "exposed offload": self.offload(forward_s + backward_s),
        }
        host = self.software.host_s
        if self.mesh.pp > 1 and self.cluster.nodes > 1 and self.tensor.ranks > 1:
            host += self.software.host_rank_s * self.tensor.ranks
        parts["host"] = max(0.0, host - sum(parts.values()))
        return parts

    def head(self) -> dict[str, float]:
        """Output projection of one micro-batch, and gathering its table and the embedding's."""
        shape, n = self.shape, self.tensor.ranks
        shapes: list[Product] = [(self.run.tokens, shape.vocab_size / n, shape.d_model, 1)]
        forward = self.gemms(shapes, backward=False, fp8=False)
        backward = self.gemms(shapes, backward=True, fp8=False)
        tables = (1 if shape.tied_embeddings else 2) * shape.vocab_size * shape.d_model
        params = [(tables / n, self.shards)]
        return {
            "matrix products": forward + backward,
            "memory traffic": self.accumulation(params),
            "exposed fsdp": self.parameters(params, forward, backward),
        }

    def loss(self) -> float:
        """Cross-entropy of one micro-batch beside its matrix products."""
        logits = self.run.tokens * self.shape.vocab_size / self.tensor.ranks
        return costs.memory_seconds(self.gpu, logits * self.software.logit_bytes)

    def products(self) -> dict[str, list[Product]]:
        """The matrix products of a mean layer's forward pass, by part."""
        shape, n, tokens = self.shape, self.tensor.ranks, self.run.tokens
        kv_heads = max(shape.num_kv_heads, n)
        qkv = shape.head_dim * (shape.num_heads + 2 * kv_heads) / n
        dense = 1 - shape.moe_layers / shape.num_layers
        up: list[Product] = []
        down: list[Product] = []
        for rows, width, count in (
            (tokens, shape.d_ff, dense),
            (tokens, shape.expert_width, (1 - dense) * shape.shared_experts),
            self.routed(1 - dense),
        ):
            if count:
                up.append((rows, (shape.matrices - 1) * width / n, shape.d_model, count))
                down.append((rows, shape.d_model, width / n, count))
        return {
            "qkv": [(tokens, qkv, shape.d_model, 1)],
            "out": [(tokens, shape.d_model, shape.head_dim * shape.num_heads / n, 1)],
            "up": up,
            "down": down,
        }

    def routed(self, share: float) -> tuple[float, float, float]:
        """Rows of one expert when all get the same, its width, and how many of them one GPU has in a mean layer."""
        shape, ep = self.shape, self.mesh.ep
        if not share:
            return 0, 0, 0
        rows = self.run.tokens * shape.experts_per_token * ep / shape.num_experts
        return rows, shape.expert_width, share * shape.num_experts / ep

    def gemms(self, shapes: list[Product], *, backward: bool, fp8: bool = True) -> float:
        """The products of a forward pass, or the two for each of the backward pass."""
        seconds, dtype = 0.0, self.run.precision
        dtype = "bf16" if dtype == "fp8" and not fp8 else dtype
        for m, n, k, count in shapes:
            orders = ((m, k, n), (k, n, m)) if backward else ((m, n, k),)
            seconds += count * sum(costs.gemm_seconds(self.gpu, *order, dtype) for order in orders)
        return seconds / self.software.matmul

    def attention(self) -> tuple[float, float]:
        """Forward pass, and backward pass: five products to the forward pass' two, for the scores are made again."""
        run, shape = self.run, self.shape
        per_token = attention_flops_per_token(shape, run.seq_len) / shape.num_layers
        flops = run.tokens * per_token / self.tensor.ranks / self.software.attention
        flops *= 2 if run.precision == "fp32" else 1
        one = {"head_dim": shape.head_dim}
        return (
            costs.attention_seconds(self.gpu, flops / 3, **one),
            costs.attention_seconds(self.gpu, flops * 5 / 6, backward=True, **one),
        )

    def passes(self) -> float:
        """Norms, residual sums, rotary embeddings, activation functions; forward and backward.

        In fp8 twice: what XLA compiles to cast inputs and gradients of the products in both orientations moves 8 bytes
        a value, 26 passes of d_model and 12 of d_ff. In float32 twice as many bytes.
        """
        shape, dense = self.shape, 1 - self.shape.moe_layers / self.shape.num_layers
        active = shape.experts_per_token + shape.shared_experts
        d_ff = dense * shape.d_ff + (1 - dense) * active * shape.expert_width
        width = (shape.d_model + d_ff / 2) / self.tensor.ranks
        passes = self.software.passes * (1 if self.run.precision == "bf16" else 2)
        return costs.memory_seconds(self.gpu, 2 * passes * self.run.tokens * width)

    def accumulation(self, params: list[tuple[float, Group]]) -> float:
        """Adding the bfloat16 gradients of one micro-batch to those in float32, of a shard in ZeRO-2 and 3."""
        if self.run.micro_batches == 1:
            return 0.0
        counts = (n / (ranks.ranks if self.run.zero > 1 else 1) for n, ranks in params)
        return costs.memory_seconds(self.gpu, 10 * sum(counts))

    def recomputed(self, forward: dict[str, float], attention: float, passes: float) -> float:
        """What the backward pass repeats of the forward pass: what is not kept; the last product of a layer never."""
        remat = self.run.remat
        if remat == "none":
            return 0.0
        groups = KEPT.get(remat) or TrainConfig(remat=remat).remat_names()
        kept = {name for names in groups for name in names}
        seconds = passes + (0.0 if "attn_core" in kept else attention)
        for product, names in RESULTS.items():
            seconds += forward[product] * sum(name not in kept for name in names) / len(names)
        gathered = 2 if "attn_out" in kept else 3
        return seconds + gathered / self.software.tensor_passes * self.tensor_group()

    def offload(self, layer: float) -> float:
        """Copying activations to the host and back, beyond the time of the layer."""
        if "offload" not in self.run.remat:
            return 0.0
        shape, n = self.shape, self.tensor.ranks
        heads = shape.head_dim * shape.num_heads
        kv_heads = shape.head_dim * max(shape.num_kv_heads, n)
        widths = {"q": heads, "attn_core": heads, "k": kv_heads, "v": kv_heads}
        widths |= {"gate": shape.d_ff, "up": shape.d_ff}
        names = TrainConfig(remat=self.run.remat).remat_names()[1]
        width = sum(widths.get(name, shape.d_model) for name in names)
        copied = 2 * 2 * self.run.tokens * width / n
        return max(0.0, costs.host_seconds(self.gpu, copied) - self.software.hide * layer)

    def tensor_group(self) -> float:
        """Gathering and scattering, or reducing, the residual stream: no arithmetic of the layer can hide it."""
        size = 2 * self.run.tokens * self.shape.d_model
        passes = self.software.tensor_passes
        if self.mesh.sp > 1:
            seconds = passes * self.collective("all-gather", size, self.tensor)
        else:
            seconds = passes / 2 * self.collective("all-reduce", size, self.tensor)
        return seconds * (self.software.tensor if self.tensor.nodes == 1 else 1.0)

    def ring(self, attention: float) -> float:
        """Keys and values once around the cp group, and with their gradients once more, beyond attention."""
        ranks = self.group("cp")
        heads = self.shape.head_dim * max(self.shape.num_kv_heads, self.tensor.ranks)
        size = 2 * 2 * self.run.tokens * heads / self.tensor.ranks
        step = self.collective("collective-permute", size, ranks)
        each = attention / ranks.ranks
        return (ranks.ranks - 1) * (max(0.0, step - each) + max(0.0, 2 * step - 2 * each))

    def experts(self) -> float:
        """Tokens to their experts and back, forward and backward."""
        shape, ranks = self.shape, self.group("ep")
        if not shape.moe_layers:
            return 0.0
        size = 2 * self.run.tokens * shape.experts_per_token * shape.d_model / self.mesh.sp
        share = shape.moe_layers / shape.num_layers
        return 4 * share * self.collective("all-to-all", size, ranks)

    def layer_params(self) -> list[tuple[float, Group]]:
        """Parameters of a mean layer on one GPU, whole over the axes of ZeRO, and the GPUs that share them."""
        shape, n = self.shape, self.tensor.ranks
        found = [(shape.dense_params / shape.num_layers / n, self.shards)]
        if shape.routed_params:
            routed = shape.routed_params / shape.num_layers / n / self.mesh.ep
            found.append((routed, self.group("fsdp", "cp")))
        return found

    def parameters(
        self, params: list[tuple[float, Group]], forward: float, backward: float
    ) -> float:
        """Parameters gathered twice (ZeRO-3) and gradients scattered (ZeRO-2 and 3), beyond that much arithmetic."""
        if self.run.zero < 2:
            return 0.0
        hide, pieces, gather, scatter = self.software.hide, self.software.gathers, 0.0, 0.0
        for count, ranks in params:
            scatter += self.collective("reduce-scatter", 2 * count, ranks)
            if self.run.zero == 3:
                gather += pieces * self.collective("all-gather", 2 * count / pieces, ranks)
        return max(0.0, gather - hide * forward) + max(0.0, gather + scatter - hide * backward)

    def hand_over(self) -> float:
        """Activations of one micro-batch to the next stage."""
        size = 2 * self.run.tokens * self.shape.d_model / self.mesh.sp
        pp = self.group("pp")
        return self.software.send_s + self.collective("collective-permute", size, pp)

    def once_a_step(self, slowest: float) -> dict[str, float]:
        """Gradients summed and parameters gathered outside the micro-batches, and the optimizer."""
        run, shape, mesh, software = self.run, self.shape, self.mesh, self.software
        layers = shape.num_layers / mesh.pp
        tables = 1 if shape.tied_embeddings else 2
        table = tables * shape.vocab_size * shape.d_model / self.tensor.ranks / mesh.pp
        count = sum(n for n, _ in self.layer_params()) * layers + table
        owned = count / (self.shards.ranks if run.zero else 1)
        whole = ("dp",) if run.zero else ("dp", "fsdp", "ep", "cp")
        reduce = self.summed("all-reduce", 4 * (owned if run.zero else count), self.group(*whole))
        scatter = gather = 0.0
        if run.zero == 1:
            scatter = self.summed("reduce-scatter", 4 * count, self.shards)
        if run.zero in (1, 2):
            gather = self.collective("all-gather", 2 * count, self.shards)
            gather *= 1 + software.gather * (self.shards.nodes - 1)
        seconds = {"exposed dp": reduce, "exposed fsdp": scatter}
        if software.reduce_in_backward:
            hidden = software.hide * slowest * 2 / 3
            seconds = {name: max(0.0, s - hidden) for name, s in seconds.items()}
        seconds["exposed fsdp"] += gather
        # Float32 parameter, gradient and both moments: read; all but the gradient and a bfloat16 copy: written.
        traffic = owned * (14 + 2 * run.moment_bytes)
        return seconds | {"optimizer": costs.memory_seconds(self.gpu, traffic)}

    def summed(self, kind: str, size: float, ranks: Group) -> float:
        """Gradients of a step over `ranks`, one tensor at a time where the backward pass does it."""
        pieces = 4 * self.shape.num_layers // self.mesh.pp + 1
        pieces = pieces if self.software.reduce_in_backward else 1
        return self.software.reduce * pieces * self.collective(kind, size / pieces, ranks)

    def group(self, *axes: str) -> Group:
        return group(self.mesh, axes, self.cluster.gpus_per_node)

    def collective(self, kind: str, size: float, ranks: Group) -> float:
        return costs.collective_seconds(self.cluster, kind, size, ranks)
