"""Predict the time of one step, from formulas; no JAX.

A step is its micro-batches on the slowest stage of the pipeline, the bubble, the communication that arithmetic does not
hide, and the optimizer. The machine is in `hardware.py` and `costs.py`, what the trainer adds in `framework.py`.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ultrascale_jax.config import Split, require_type
from ultrascale_jax.config.lowering import GATHER_TOGETHER
from ultrascale_jax.plan.formulas import (
    context,
    costs,
    experts,
    linear_attention,
    muon,
    pipeline,
    pipeline_memory,
)
from ultrascale_jax.plan.formulas.activations import (
    layer_of,
    loss_chunks,
    offloaded_bytes,
    saved_bytes,
)
from ultrascale_jax.plan.formulas.framework import (
    NORMED_RESULTS,
    RESULTS,
    ULTRASCALE,
    kept_names,
)
from ultrascale_jax.plan.formulas.layer_time import LayerTime, Product
from ultrascale_jax.plan.formulas.memory import breakdown, host_bytes, host_moments
from ultrascale_jax.plan.formulas.parameters import trained_params, weights_of
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.workload import (
    Group,
    Run,
    group,
    of_layer,
    of_sizes,
    of_tokens,
)

SHARDED = ("fsdp", "ep", "cp"), ("fsdp", "cp")
"""Axes over which ZeRO splits what all tokens meet, and routed experts, which ep splits already."""


class Params(NamedTuple):
    """Parameters on one GPU, gathered over ZeRO's axes."""

    count: float
    ranks: Group
    """GPUs that share them."""
    width: int
    """Bytes of one as ZeRO-3 gathers it: 1 of a dense layer's in fp8, which are cast before."""
    trained: float
    """Number of parameters that have gradients: as many, or their adapters' parameters."""


def estimate(run: Run, cluster: Cluster, *, peak_bytes: int | None = None) -> StepPrediction:
    """Predict one step of `run` on `cluster`; its memory is by formula unless `peak_bytes` tells it.

    Raises `UserError` where the cluster has another number of GPUs than the run.
    """
    require_type("run", run, Run, "Run.of(cfg, num_gpus) makes one")
    require_type("cluster", cluster, Cluster, "find_cluster(None, 'h100', num_gpus) makes one")
    if cluster.num_gpus != run.num_gpus:
        cluster.check_size(run.num_gpus, f"the run's mesh {run.mesh.text}")
    peak = breakdown(run).peak_bytes if peak_bytes is None else peak_bytes
    return Step(run, cluster).predict(peak)


def update_bytes(run: Run, matrices: float, tables: float) -> float:
    """Count the bytes that the optimizer reads and writes for so many parameters in layers, and in tables.

    Parameter, float32 gradient and both moments are read; parameter and moments are written, and a bfloat16 copy of a
    parameter that is stored in float32.
    """
    width = 8 if run.weight_bytes == 2 else 14
    of_tables = 14 + 2 * run.moment_bytes
    return (width + 2 * run.matrix_moment_bytes) * matrices + of_tables * tables


class Step:
    """The terms of one step on one GPU, in seconds."""

    overheads = ULTRASCALE

    def __init__(self, run: Run, cluster: Cluster):
        self.run, self.cluster = run, cluster
        self.shape, self.mesh, self.gpu = run.shape, run.mesh, cluster.gpu
        self.layer_time = LayerTime(run, cluster)
        self.passes, self.tensor = self.layer_time.passes, self.layer_time.tensor
        self.tensor_axes = "exposed " + (
            "*".join(a for a in ("sp", "tp") if run.mesh.sizes[a] > 1) or "sp"
        )
        self.shards = self.group(*SHARDED[0])
        self._sizes, self._tokens, self._layer = {}, {}, {}

    def with_policy(self, run: Run) -> "Step":
        """Return the step of `run`, which differs in recomputation or stash alone; what follows from neither stays."""
        step = copy.copy(self)
        vars(step).pop("_policies", None)
        step.run, step._layer = run, {}
        return step

    def with_schedule(self, run: Run) -> "Step":
        """Return the step of `run`, which differs in its schedule alone, recomputation and stash too; the passes of a
        layer stay."""
        step = self.with_policy(run)
        step._sizes, step.layer_time = {}, LayerTime(run, self.cluster)
        return step

    @property
    def by_policy(self) -> list[tuple["Step", int]]:
        """The steps of `Run.by_policy`, and the number of layers of each."""
        if isinstance(self.run.remat, Split):
            return self._policies
        return [(self, self.run.by_policy[0][1])]

    @functools.cached_property
    def _policies(self) -> list[tuple["Step", int]]:
        return [(self.with_policy(run), count) for run, count in self.run.by_policy]

    def mean(self, term: Callable[["Step"], float]) -> float:
        """Return the mean of a term over the layers."""
        every = sum(count for _, count in self.by_policy)
        return sum(count * term(step) for step, count in self.by_policy) / every

    def predict(self, peak_bytes: int) -> StepPrediction:
        """Return the step as the sum of its parts."""
        parts = self.parts()
        return StepPrediction(
            run=self.run,
            gpu=self.gpu,
            source="formula",
            step_s=sum(parts.values()),
            parts={name: seconds for name, seconds in parts.items() if seconds > 0},
            peak_bytes=peak_bytes,
            host_bytes=host_bytes(self.run),
        )

    def parts(self) -> dict[str, float]:
        """Split the step's time into its parts; stages are equal, embedding, head and loss split over all."""
        m, share = self.run.microbatches, 1 / self.mesh.pp
        layers = self.run.rank_layers + self.run.head_modules
        head, loss = self.head(), self.loss()
        parts: dict[str, float] = {}
        times = m * layers / sum(count for _, count in self.by_policy)
        for step, count in self.by_policy:
            for name, seconds in step.layer().items():
                parts[name] = parts.get(name, 0.0) + times * count * seconds
        layer_s = sum(parts.values()) / (m * layers)
        parts["exposed fsdp"] += m * self.between_policies()
        for name, seconds in head.items():
            parts[name] = parts.get(name, 0.0) + m * share * seconds
        parts["loss"] = m * share * loss
        parts["reference"] = (m + self.mesh.pp - 1) * self.reference()
        if self.mesh.pp > 1:
            head_s = share * (sum(head.values()) + loss) + self.run.head_modules * layer_s
            parts |= self.pipeline(layer_s, head_s)
            parts["exposed ep"] += self.mean(Step.exchanges_alone)
        for name, seconds in self.once_a_step(layers).items():
            parts[name] = parts.get(name, 0.0) + seconds
        return parts | {"step overhead": self.overheads.step_s}

    def reference(self) -> float:
        """Time the forward pass of one micro-batch through the reference of `train.dpo` or the teacher, and its logits.

        With `train.dpo` the policy's logits are computed again: its loss is known before the gradients of its tokens.
        """
        if not self.run.reference:
            return 0.0
        step = type(self)(self.run.of_reference, self.cluster)
        forward_s = step.passes.forward
        gather_s, _ = step.moved(step.layer_params)
        waited = max(0.0, gather_s - step.overheads.hide * forward_s)
        waited += step.tensor_group() / 2 + step.exchanged()[0]
        again = 0.0 if self.run.teaches else self.head_products()
        layers_s = step.run.rank_layers * (forward_s + waited)
        return layers_s + step.head_products() + step.loss() + again

    def copies(self) -> float:
        """Time the copies that XLA makes in the pipeline's loop over layers where forward and backward pass share it.

        A layer's part of the stacks of parameters is cut out for either pass, what it keeps is written to its slot, and
        the W queue is written and read.
        """
        run = self.run
        if not self.passes_overlap:
            return 0.0
        count = sum(params.count for params in self.layer_params)
        params = count / (self.shards.ranks if run.zero == 3 else 1)
        layer = layer_of(run)
        activations = 2 * sum(saved_bytes(run).values())
        if self.splits_backward:
            activations += 2 * pipeline_memory.w_queue_bytes(run, layer)
        return costs.memory_seconds(self.gpu, activations + 8 * params)

    @property
    def passes_overlap(self) -> bool:
        """Return whether ticks of a pipeline overlap one stage's forward pass with another's backward pass."""
        return self.mesh.pp > 1 and pipeline_memory.overlaps_passes(self.run)

    @property
    def waited_share(self) -> float:
        """Return the share of the tensor group's communication that a layer waits for.

        Where a tick runs a forward and a backward pass, the communication of one is overlapped with the products of the
        other, as far as these last. With ZeRO-3 parameters take that time.
        """
        passes = self.passes
        if not self.passes_overlap or self.run.zero == 3 or self.tensor.ranks == 1:
            return 1.0
        beside = sum(passes.products.values()) + passes.backward_products
        beside += passes.attention + passes.attention_backward
        return max(0.0, 1 - self.overheads.hide * beside / self.tensor_group())

    def pipeline(self, layer_s: float, head_s: float) -> dict[str, float]:
        """Time what the executor's table adds to a rank's own work; its share of head and loss takes `head_s`.

        In lock step a tick takes what it runs on any rank. A tick sends activations forward and gradients back; the
        first stage's input and its gradient, the last one's result and its gradient are summed over all ranks, for all
        hold a part of the vocabulary.
        """
        run, counts = self.run, pipeline.counts(self.run)
        m, rank_s = run.microbatches, run.rank_layers * layer_s
        passes, weight = self.passes, self.passes.weight_gradients
        times = passes.forward, passes.backward - weight + self.mean(Step.recomputed), weight
        f, b, w = (rank_s * part / sum(times) for part in times)
        chunks = {"F": f, "B": b if self.splits_backward else b + w, "W": w}
        ticks = sum(counts.ticks[kind] * seconds for kind, seconds in chunks.items())
        idle = ticks / run.virtual_stages - m * rank_s
        idle += (counts.times["head"] - m) * head_s
        size = 2 * run.tokens * self.shape.d_model / self.mesh.sp
        summed = self.collective("all-reduce", size, self.group("pp"))
        sums = counts.times["embed"] + 2 * counts.times["head"] + counts.times["embed_gradient"]
        sends = counts.ticks["F"] + counts.ticks["B"]
        return {"bubble": idle, "exposed pp": sends * self.hand_over() + sums * summed}

    def layer(self) -> dict[str, float]:
        """Forward and backward pass of one micro-batch through one layer."""
        passes, repeated = self.passes, self.recomputed()
        forward_s, backward_s = passes.forward, passes.backward + repeated
        parts = {
            "matrix products": sum(passes.products.values()) + passes.backward_products,
            "attention": passes.attention + passes.attention_backward,
            "memory traffic": passes.traffic + self.accumulation(self.layer_params) + self.copies(),
            "recomputation": repeated,
            self.tensor_axes: self.waited_share * self.tensor_group(),
            "exposed cp": sum(self.exchanged()),
            "exposed ep": self.experts(),
            "exposed fsdp": self.layer_parameters(forward_s, backward_s),
            "exposed offload": self.offload(forward_s, backward_s),
        }
        moved = self.moved(self.layer_params)
        hidden = 2 * moved[0] + moved[1] - parts["exposed fsdp"]
        hidden += (1 - self.waited_share) * self.tensor_group()
        hidden += self.exchanges() - parts["exposed ep"] if self.hides_exchanges else 0.0
        parts["cores lent to NCCL"] = self.overheads.nccl_cores / self.gpu.cores * max(0.0, hidden)
        parts["host"] = max(0.0, self.overheads.host_s - sum(parts.values()))
        return parts

    def head(self) -> dict[str, float]:
        """Time the output projection of one micro-batch, and gathering its table and the embedding's.

        Each module of `model.mtp_layers` has one too, and a projection of its own. The embedding's columns that ZeRO-3
        splits may stay so, and looked-up tokens are communicated (`embed_lookup` of sharding/primitives.py).
        """
        shape, n = self.shape, self.tensor.ranks
        forward, backward = self.head_products(), self.head_products(backward=True)
        stays = self.run.zero == 3 and self.mesh.pp == 1 and self.shards.ranks > 1
        stays &= self.mesh.cp == 1 or self.mesh.sp == 1
        stays &= shape.d_model % (self.shards.ranks * n) == 0
        head = shape.vocab_size * shape.d_model / n
        width = layer_of(self.run).width
        tables = [self.params(head if shape.tied_embeddings else 2 * head, width)]
        size = 2 * self.run.tokens * shape.d_model / self.mesh.sp
        passes = 1 if self.run.lora.enabled else 2  # a frozen embedding has no gradient
        looked_up = passes * self.collective("all-to-all", size, self.shards) if stays else 0.0
        gathered = [self.params(head, width)] if stays else tables
        return {
            "matrix products": forward + backward,
            "memory traffic": self.accumulation(tables),
            "exposed fsdp": self.parameters(gathered, forward, backward) + looked_up,
        }

    def head_products(self, *, backward: bool = False) -> float:
        """Time the matrix products of the output projection of one micro-batch, or its backward pass's products."""
        shape, n, D = self.shape, self.tensor.ranks, self.shape.d_model
        shapes: list[Product] = [(self.run.tokens, shape.vocab_size / n, D, 1 + shape.mtp_layers)]
        if shape.mtp_layers:
            shapes.append((self.run.tokens / self.mesh.sp, D, 2 * D, shape.mtp_layers))
        if not backward:
            return self.layer_time.gemms(shapes, "result", fp8=False)
        inputs = self.layer_time.gemms(shapes, "input", fp8=False)
        if self.run.lora.enabled:
            return inputs
        return inputs + self.layer_time.gemms(shapes, "weight", fp8=False)

    @of_tokens
    def loss(self) -> float:
        """Time the cross-entropy of one micro-batch without its matrix products.

        Where logits come in several chunks, each reads and writes the head's gradient in float32.
        """
        losses = 1 + self.shape.mtp_layers
        chunks, _ = loss_chunks(self.run)
        logits = self.run.tokens * self.shape.vocab_size / self.tensor.ranks
        table = self.shape.d_model * self.shape.vocab_size / self.tensor.ranks
        sums = 8 * table * chunks * (chunks > 1 and not self.run.lora.enabled)
        size = logits * self.overheads.logit_bytes + sums
        return costs.memory_seconds(self.gpu, losses * size)

    def accumulation(self, params: list[Params]) -> float:
        """Time adding one micro-batch's bfloat16 gradients to those in float32, of a shard in ZeRO-2 and 3."""
        if self.run.microbatches == 1:
            return 0.0
        counts = (p.trained / (p.ranks.ranks if self.run.zero > 1 else 1) for p in params)
        return costs.memory_seconds(self.gpu, 10 * sum(counts))

    @of_layer
    def recomputed(self) -> float:
        """Time what the backward pass repeats of the forward pass: all that is not kept but a layer's last product.

        A norm that reads that product needs it.

        Without a pipeline, what `none` keeps beyond `selective` is charged with its way to memory and back.
        A pipeline that stashes the inputs of stages repeats their forward pass before that.
        """
        remat, passes, seconds = self.run.policy, self.passes, 0.0
        if self.mesh.pp > 1 and self.run.stash == "input":
            seconds = passes.forward + self.waited_share * self.tensor_group() / 2
        if remat == "none":
            return seconds if self.mesh.pp > 1 else self.kept_beyond_names()
        kept = self.kept
        seconds += passes.traffic / 3
        if "attn_core" not in kept:
            seconds += passes.attention + self.exchanged()[0]
        is_normed = self.shape.norm_placement != "pre"
        for product, names in (NORMED_RESULTS if is_normed else RESULTS).items():
            available = set() if product == "routed up" and remat == "dots" else kept
            again = sum(name not in available for name in names) / len(names)
            seconds += passes.products[product] * again
        # For the gradients of adapters alone XLA gathers the inputs of products while others run.
        moves = 0 if self.run.lora.enabled else 2
        moves += ("attn_out" not in kept) + (is_normed and "mlp_out" not in kept)
        again = moves / self.overheads.tensor_passes
        return seconds + again * self.waited_share * self.tensor_group()

    def kept_beyond_names(self) -> float:
        """Time writing and reading what a layer keeps with `none` and not with `selective`."""
        named = self.run.with_remat("selective")
        every, some = (sum(saved_bytes(r).values()) for r in (self.run, named))
        return costs.memory_seconds(self.gpu, self.overheads.kept_passes * (every - some))

    @property
    def kept(self) -> set[str]:
        """Names of the tensors that a layer keeps for its backward pass."""
        return kept_names(self.run.policy)

    def offload(self, forward: float, backward: float) -> float:
        """Time copying activations to the host in the forward pass, and back in the backward pass, beyond their work.

        In DGX machines a GPU reaches its network card over the same PCIe link, so what a layer's parameters and
        gradients send between nodes uses it too. The simulation of compiled programs does not charge that.
        """
        copied = offloaded_bytes(self.run)
        if not copied:
            return 0.0
        (gathered, scattered), hide = self.sent_between_nodes(), self.overheads.hide
        passes = (forward, copied + gathered), (backward, copied + gathered + scattered)
        return sum(max(0.0, costs.host_seconds(self.gpu, size) - hide * s) for s, size in passes)

    def sent_between_nodes(self) -> tuple[float, float]:
        """Count the bytes that one GPU sends to other nodes when a layer's parameters are gathered (ZeRO-3), and when
        their gradients are scattered.
        """
        if self.run.zero < 3:
            return 0.0, 0.0
        width, params = layer_of(self.run).width, self.layer_params
        sent = [p.count * (p.ranks.nodes - 1) / p.ranks.nodes / p.ranks.per_node for p in params]
        gathered = sum(p.width * count for p, count in zip(params, sent, strict=True))
        return gathered, width * sum(sent)

    @of_tokens
    def tensor_group(self) -> float:
        """Time gathering and scattering, or reducing, the residual stream: no arithmetic of the layer can hide it.

        Folded experts need none of it, only shared experts do.
        """
        size, shape = 2 * self.run.tokens * self.shape.d_model, self.shape
        spared = self.run.folds and not shape.shared_width
        halves = shape.halves_share - spared * shape.expert_share / 2
        passes = self.overheads.tensor_passes * halves
        if self.mesh.sp > 1:
            return passes * self.collective("all-gather", size, self.tensor)
        return passes / 2 * self.collective("all-reduce", size, self.tensor)

    @of_tokens
    def exchanged(self) -> tuple[float, float]:
        """Time how long attention waits for cp, forward and backward."""
        if self.mesh.cp == 1:
            return 0.0, 0.0
        waits = [(self._waits(run), share) for run, share in self.run.kinds]
        seconds = (sum(share * one[i] for one, share in waits) for i in range(2))
        linear = self.shape.linear_share
        linear *= linear_attention.exposed_seconds(self.run, self.cluster)
        forward, backward = (linear + self.shape.full_share * full for full in seconds)
        return forward, backward

    def _waits(self, run: Run) -> tuple[float, float]:
        passes = self.passes if run is self.run else type(self.layer_time)(run, self.cluster).passes
        times = passes.attention, passes.attention_backward
        return context.exposed_seconds(run, self.cluster, *times)

    def experts(self) -> float:
        """Time how long a layer waits for tokens on their way to experts and back, forward and backward.

        Where the passes of a pipeline's tick hide each other's exchanges, for the excess over their computation.
        """
        if not self.hides_exchanges:
            return self.exchanges()
        passes = self.passes
        beside = sum(passes.products.values()) + passes.backward_products + self.recomputed()
        beside += passes.attention + passes.attention_backward + passes.traffic
        return max(0.0, self.exchanges() - self.overheads.hide * beside)

    def exchanges(self) -> float:
        """Time tokens to their experts and back, and there again if what came is not kept, overlapped with nothing."""
        if self.shape.experts is None:
            return 0.0
        halves = experts.num_chunks(self.run) == 2
        waited = self.overheads.overlapped if halves else self.overheads.travel
        return waited * sum(self.ways) * self.shape.expert_share * self.one_way

    def exchanges_alone(self) -> float:
        """Time the exchanges in ticks that run one pass alone, of a pipeline whose passes hide each other's."""
        if not self.hides_exchanges:
            return 0.0
        counts, layers = pipeline.counts(self.run).ticks, self.run.chunk_layers
        (forward, backward), share = self.ways, self.shape.expert_share
        alone = forward * (counts["all"] - counts["B"]) + backward * (counts["all"] - counts["F"])
        return self.overheads.travel * share * alone * layers * self.one_way

    @property
    def splits_backward(self) -> bool:
        """Return whether the pipeline's schedule splits gradients of inputs and of weights, and so queues."""
        return pipeline.counts(self.run).slots["weights"] > 0

    @property
    def hides_exchanges(self) -> bool:
        """Return whether the passes of a tick hide each other's exchanges, as `Lowering.orders_exchanges` says.

        With a tensor group or cp none was compiled, and none is taken to be hidden.
        """
        return (
            self.run.lowering.orders_exchanges
            and self.mesh.tensor * self.mesh.cp == 1
            and self.passes_overlap
        )

    @property
    def ways(self) -> tuple[int, int]:
        """Return the times that tokens are sent to experts or back, forward and backward."""
        return 2, 2 if "dispatched" in self.kept else 3

    @property
    @of_tokens
    def one_way(self) -> float:
        """Time one way of tokens to their experts or back."""
        return experts.dispatch_seconds(self.run, self.cluster)

    @property
    @of_sizes
    def layer_params(self) -> list[Params]:
        """Count the parameters of a mean layer: the dense ones, then the routed experts'."""
        shape, n, experts = self.shape, self.tensor.ranks, self.shape.experts
        router = 0 if experts is None else shape.expert_share * shape.d_model * experts.num
        whole = shape.attention_matrices[2] + router + shape.join_params / shape.layers
        dense = whole + (shape.dense_params / shape.layers - whole) / n
        layer = layer_of(self.run)
        params = [self.params(dense, layer.input_width)]
        if shape.routed_params:
            routed = shape.routed_params / shape.layers / n / self.mesh.ep
            params.append(self.params(routed, layer.width, self.group(*SHARDED[1])))
        if self.run.lora.enabled:
            whole = replace(self.run, zero=0)
            layers = self.run.rank_layers + self.run.head_modules
            adapters = trained_params(whole, weights_of(whole)) / layers
            params[0] = params[0]._replace(trained=adapters)
        return params

    def params(self, count: float, width: int, ranks: Group | None = None) -> Params:
        """Return parameters that ZeRO shards over `ranks`, trained if there are no adapters."""
        trained = 0.0 if self.run.lora.enabled else count
        return Params(count, ranks or self.shards, width, trained)

    def parameters(self, params: list[Params], forward: float, backward: float) -> float:
        """Time gathering parameters twice (ZeRO-3) and scattering gradients (ZeRO-2 and 3), beyond that much work."""
        hide = self.overheads.hide
        gather, scatter = self.moved(params)
        return max(0.0, gather - hide * forward) + max(0.0, gather + scatter - hide * backward)

    def layer_parameters(self, forward: float, backward: float) -> float:
        """Time gathering a layer's parameters; routed experts' overlaps with a layer if the last one gathers them."""
        params = self.layer_params
        if self.run.lowering.gathers_ahead:
            return self.parameters(params, *self.hiding_passes(forward, backward))
        return self.parameters(params[:1], forward, backward) + self.matrices_of_experts()

    def hiding_passes(self, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of a layer's passes that overlap with a neighbour's parameters and gradients.

        After a ring, whose hops would wait for them; and if attention runs again between sp's reductions, after the
        MLP's input gradient (`Lowering.delay`).
        """
        passes, products = self.passes, self.passes.products
        one = passes.backward_products / sum(products.values())
        if self.run.ring[0] > 1:
            hidden = one * products["qkv"] + passes.attention_backward / 2
            return forward - products["qkv"], hidden
        if self.mesh.sp > 1 and self.shape.experts is None and "attn_out" not in self.kept:
            waiting = self.recomputed() + one * (products["up"] + products["down"]) / 2
            return forward, backward - waiting
        return forward, backward

    def moved(self, params: list[Params]) -> tuple[float, float]:
        """Time gathering parameters once (ZeRO-3), and scattering their gradients (ZeRO-2 and 3)."""
        zero, width, gather, scatter = self.run.zero, layer_of(self.run).width, 0.0, 0.0
        gathers_at_once = GATHER_TOGETHER in self.run.lowering.xla_options
        pieces = 1 if gathers_at_once else self.overheads.gathers
        for count, ranks, size, trained in params if zero >= 2 else ():
            if trained:
                scatter += self.collective("reduce-scatter", width * trained, ranks)
            if zero == 3:
                gather += pieces * self.collective("all-gather", size * count / pieces, ranks)
        return gather, scatter

    def between_policies(self) -> float:
        """Time gathering and scattering where a loop over layers with one policy ends and another begins, in one
        micro-batch: nothing of it is ahead or late there."""
        if not (self.run.lowering.gathers_ahead and isinstance(self.run.remat, Split)):
            return 0.0
        gather, scatter = self.moved(self.layer_params)
        return 2 * gather + scatter

    def matrices_of_experts(self) -> float:
        """Time the same for routed experts; a layer gathers them itself: its attention and dense products hide it.

        Backward these come after the experts, unless they are repeated before.
        """
        passes, hide = self.passes, self.overheads.hide
        routed = sum(passes.products[name] for name in ("routed up", "routed down"))
        beside = hide * (passes.forward - passes.traffic / 3 - routed)
        again = beside if self.run.policy not in ("none", "selective") else 0.0
        gather, scatter = self.moved(self.layer_params[1:])
        waits = gather - beside, gather - again, scatter - 2 * beside
        return sum(max(0.0, seconds) for seconds in waits)

    def hand_over(self) -> float:
        """Time the activations of one micro-batch on the way to the next stage."""
        size = 2 * self.run.tokens * self.shape.d_model / self.mesh.sp
        pp = self.group("pp")
        return self.collective("collective-permute", size, pp)

    def once_a_step(self, layers: float, hidden: float = 0.0) -> dict[str, float]:
        """Time summing gradients of `layers` behind `hidden` seconds, gathering parameters, and the optimizer."""
        run, shape, mesh = self.run, self.shape, self.mesh
        tables = 1 if shape.tied_embeddings else 2
        table = tables * shape.vocab_size * shape.d_model / self.tensor.ranks / mesh.pp
        reduce = scatter = gather = traffic = 0.0
        for (count, shards, _, trained), axes in zip(self.layer_params, SHARDED, strict=False):
            parts = shards.ranks if run.zero else 1
            head = table if axes == SHARDED[0] else 0.0
            trained_head = 0.0 if run.lora.enabled else head
            summed = trained * layers + trained_head
            whole = self.group("dp", *(() if run.zero else axes))
            reduce += self.summed("all-reduce", 4 * summed / parts, whole)
            traffic += update_bytes(run, trained * layers, trained_head) / parts
            if run.zero == 1:
                scatter += self.summed("reduce-scatter", 4 * summed, shards)
            if run.zero in (1, 2):
                gather += self.gathered(2 * (count * layers + head), shards)
        return {
            "exposed dp": max(0.0, reduce - hidden),
            "exposed fsdp": max(0.0, scatter - hidden) + gather,
            "optimizer": costs.memory_seconds(self.gpu, traffic)
            + (muon.update_seconds(run, self.cluster) if run.muon else 0.0),
            "exposed offload": costs.host_seconds(self.gpu, 2 * host_moments(run)),
        }

    def summed(self, kind: str, size: float, ranks: Group) -> float:
        """Time the sum of a step's gradients over `ranks`, all together."""
        return self.collective(kind, size, ranks)

    def gathered(self, size: float, ranks: Group) -> float:
        """Time the all-gather of updated parameters over `ranks`, all together."""
        return self.collective("all-gather", size, ranks)

    def group(self, *axes: str) -> Group:
        return group(self.mesh, axes, self.cluster.gpus_per_node)

    def collective(self, kind: str, size: float, ranks: Group) -> float:
        return costs.collective_seconds(self.cluster, kind, size, ranks)
