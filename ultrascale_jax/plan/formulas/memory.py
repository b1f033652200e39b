"""Predict the memory of one GPU, part by part, from formulas; no JAX.

`breakdown` follows `train_step/step.py`: what is stored between steps, what lives through a micro-batch, and the moment
at which the sum is largest. Nothing is fitted: every term is a buffer of XLA's program, and
`docs/planning/memory_xla.csv` compares the sums with XLA's own, `experts.csv` for models with experts; pipelines are
in `pipeline_memory.py`. `tests/planned_memory.py` has programs with adapters, a teacher, fp8 and newer layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale_jax.config import require_type
from ultrascale_jax.plan.formulas import muon, pipeline_memory
from ultrascale_jax.plan.formulas.activations import (
    Layer,
    attention_workspace,
    document_mask,
    experts_forward_bytes,
    kept_bytes,
    layer_of,
    loss_chunks,
    mtp_saved_bytes,
    offloaded_bytes,
    returning_bytes,
    working_set,
)
from ultrascale_jax.plan.formulas.parameters import (
    Weights,
    expert_matrices,
    frozen_in_fp8,
    gathered_in_fp8,
    largest_row,
    layer_params,
    resting_bytes,
    sharded_params,
    trained_params,
    weights_of,
)
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.workload import Run, of_sizes

WORKSPACE = "cuDNN workspace"
"""The part that cuDNN takes in addition to XLA's plan."""

NF4_BITS = 4.127
"""Bits of a parameter in QLoRA's 4-bit NormalFloat with its quantized scales (arXiv 2305.14314, section 3)."""

OTHERS = 1.7
"""Copies of the other layers of a row, parameters or gradients: four programs differ from it by 1 to 5%."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one GPU at the peak of a step, by part."""

    parts: dict[str, float]
    """Name, as `optimizer state` or `activations: attention`, to bytes."""

    @property
    def peak_bytes(self) -> int:
        """All parts together."""
        return int(sum(self.parts.values()))

    @property
    def planned_bytes(self) -> int:
        """The parts that XLA plans."""
        return self.peak_bytes - int(self.parts.get(WORKSPACE, 0))


def breakdown(run: Run) -> MemoryBreakdown:
    """Predict the bytes that `run` needs in this project's trainer, at the moment that needs most.

    That is in the backward pass of a layer, in the loss, where zero 2 scatters a micro-batch's gradients, or, with few
    tokens, in the optimizer, where only the reduced gradients are left.
    """
    require_type("run", run, Run, "Run.of(cfg, num_gpus) makes one")
    weights, layer = weights_of(run), layer_of(run)
    resting, update = _fixed(run)
    moments = [update]
    if run.mesh.pp > 1:
        moments += pipeline_memory.moments(run, weights, layer)
    else:
        living = sums(run, weights)
        mask = {"activations: document mask": document_mask(run)}
        for place, (policy_run, _) in enumerate(run.by_policy, start=1):
            kept = activations(run, layer, run.by_policy[:place])  # of the layers after it none
            moments.append(living | kept | mask | _backward(policy_run, weights, layer))
        kept = activations(run, layer, run.by_policy)
        moments.append(living | kept | _loss(run, weights, layer))
        if run.adapter_params and run.lowering.gathers_ahead:
            moments.append(living | kept | _forward_of_frozen(run, weights, layer))
    scatters = run.zero == 2 and run.microbatches > 1 and not run.adapter_params
    if run.mesh.pp == 1 and scatters:
        moments.append(sums(run, weights) | _scatter(weights))
    largest = max(moments, key=lambda parts: sum(parts.values()))
    parts = resting | largest | {WORKSPACE: attention_workspace(run)}
    return MemoryBreakdown({name: value for name, value in parts.items() if value})


@of_sizes
def _fixed(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Count the bytes that neither recomputation nor stash changes: the state, and the optimizer's buffers."""
    weights = weights_of(run)
    update = {"gradients": 4 * trained_params(run, weights)}
    return state(run, weights), update | ({"workspace": muon.workspace(run)} if run.muon else {})


def least_bytes(run: Run) -> float:
    """Count the bytes of `run` that no micro-batch and no recomputation changes: a lower bound of the peak."""
    weights = weights_of(run)
    living = pipeline_memory.sums(run) if run.mesh.pp > 1 else sums(run, weights)
    return sum(_fixed(run)[0].values()) + sum(living.values())


def least_with_any_policy(run: Run) -> float:
    """Bound from below the peak of a `run` that recomputes nothing, and of all runs that `with_remat` derives from it.

    The backward pass of a layer has the least in hand where nothing is repeated.
    """
    return least_bytes(run) + working_set(run)


def host_bytes(run: Run) -> int:
    """Count the bytes of one GPU in the host's memory: its moments there, and activations of all layers and of one
    micro-batch.
    """
    activations = sum(count * offloaded_bytes(policy_run) for policy_run, count in run.by_policy)
    return int(activations) + host_moments(run)


def host_moments(run: Run) -> int:
    """Count the bytes of one GPU's moments in the host's memory: of its layers, not of the tables or `mtp_layers`."""
    if not run.host_moment_bytes:
        return 0
    return int(run.host_moment_bytes * layer_matrices(run, weights_of(run)))


def layer_matrices(run: Run, weights: Weights) -> float:
    """Count the trained parameters of one GPU in matrices of the layers, or of adapters: not of the tables or
    `mtp_layers`."""
    trained = trained_params(run, weights)
    if run.adapter_params:
        return trained
    share = 1 - run.shape.mtp_layers / run.shape.layers
    return share * (trained - weights.tables / (run.shards if run.zero else 1))


def moments(run: Run, weights: Weights) -> float:
    """Count the bytes of one GPU's moments, in either memory."""
    trained = trained_params(run, weights) + (0 if run.adapter_params else weights.vectors)
    matrices = layer_matrices(run, weights)
    return run.moment_bytes * (trained - matrices) + run.matrix_moment_bytes * matrices


def state(run: Run, weights: Weights) -> dict[str, float]:
    """Count the bytes between steps: master parameters, AdamW's moments, the batch, four bytes a number.

    The base of adapters is stored in the type of compute or in fp8, and has no moments; so is the reference of
    `train.dpo` or `train.distill`.
    """
    trained = trained_params(run, weights)
    arrays = 4 if run.document_mask else 3
    arrays += 2 * run.top_k + 1 if run.top_k else 0
    matrices = sharded_params(run, weights, tables=False)
    parameters = {"master parameters": resting_bytes(run, trained + weights.vectors, matrices)}
    width = 4 if run.precision == "fp32" else 2
    in_fp8 = frozen_in_fp8(run, weights) / (run.shards if run.zero else 1)
    frozen = width * sharded_params(run, weights) - (width - 1) * in_fp8
    parameters["frozen parameters"] = frozen * bool(run.adapter_params)
    if run.reference_rests:
        alone, frozen_weights = run.of_reference, weights_of(run.of_reference)
        parameters["frozen parameters"] += (
            width * sharded_params(alone, frozen_weights) + 4 * frozen_weights.vectors
        )
    return parameters | {
        "optimizer state": moments(run, weights) - host_moments(run),
        "batch": 4 * arrays * run.tokens * run.microbatches,
    }


def quantized_saving(run: Run) -> int:
    """Count the bytes that QLoRA would save: frozen matrices of the layers in NF4, which this trainer has not."""
    if not run.adapter_params:
        return 0
    width = 1 if run.frozen_in_fp8 else 4 if run.precision == "fp32" else 2
    frozen = sharded_params(run, weights_of(run), tables=False)
    return int((width - NF4_BITS / 8) * frozen)


def sums(run: Run, weights: Weights) -> dict[str, float]:
    """Count the bytes that live through all micro-batches: parameters in compute dtype, float32 sums of gradients.

    zero < 3 gathers the parameters once a step; the tables go after the loss if it was the last. zero 3 gathers each
    layer, of shards that are cast once, unless each layer sums its gradients in float32. Only zero 2 and 3 shard the
    sums. Parameters stored in the type of compute need no cast.
    """
    several, trained = run.microbatches > 1, not run.adapter_params
    width = 4 if run.precision == "fp32" else 2
    casts_blocks, casts_tables = width != run.weight_bytes and trained, width == 2 and trained
    if run.zero == 3:
        used = sharded_params(run, weights, tables=False)
        used *= casts_blocks and not run.lowering.sums_by_layer
    else:
        used = weights.blocks * (casts_blocks or run.zero > 0)
        used += weights.tables * several * (casts_tables or run.zero > 0)
    whole = weights.blocks + weights.tables
    if run.reference_rests and run.zero in (1, 2):
        reference = weights_of(run.of_reference)
        used += reference.blocks + reference.tables  # gathered once a step
    if run.adapter_params:
        whole = trained_params(run, weights)
    return {
        "compute parameters": width * used - (width - 1) * gathered_in_fp8(run, weights),
        "accumulation buffer": 4
        * several
        * (trained_params(run, weights) if run.zero >= 2 else whole),
    }


def activations(
    run: Run, layer: Layer, parts_of_layers: Sequence[tuple[Run, int]]
) -> dict[str, float]:
    """Count the bytes that these of the layers keep from forward to backward pass."""
    parts = kept_bytes(parts_of_layers)
    parts["mtp"] = run.shape.mtp_layers * mtp_saved_bytes(run.by_policy[-1][0], layer)
    return {f"activations: {name}": size for name, size in parts.items()}


def _backward(run: Run, weights: Weights, layer: Layer) -> dict[str, float]:
    """Count the bytes that the backward pass of a layer adds.

    Where layers gather ahead and scatter late, the parameters of two layers are there, and a layer's gradients.
    Gradients of the blocks collect in the type and sharding in which the blocks are used: shards with zero 3.
    The head's gradient waits in the type of compute until the backward pass is over. The layer's own parameters in
    memory are attention's and two of the feed-forward layer's: gathered, cut out of the stack, or as gradients; of the
    routed experts there are more. In a row of several layers the others' parameters and gradients are there too.
    """
    gathered = run.zero == 3 and run.shards > 1
    used = weights.attention + 2 * weights.matrix + expert_matrices(run) * weights.routed
    used *= layer.input_width
    if run.lowering.gathers_ahead:
        row = largest_row(run, weights)
        used += (layer.input_width + layer.width) * row.params
        if row.rows > 2:
            used += OTHERS * (1 - 1 / row.layers) * layer.width * row.params
    gradients = _block_gradients(run, weights, layer) + layer.width * weights.table
    if run.adapter_params:
        gradients = 4 * trained_params(run, weights)
    return {
        "gradients": gradients,
        "communication buffers": used if gathered else 0,
        "workspace": working_set(run) + returning_bytes(run) + (0 if gathered else used),
    }


def _block_gradients(run: Run, weights: Weights, layer: Layer) -> float:
    """Count the bytes of a micro-batch's gradients of the blocks: shards with zero 3, float32 if a layer sums them."""
    if run.zero == 3:
        width = 4 if run.lowering.sums_by_layer else layer.width
        return width * sharded_params(run, weights, tables=False)
    return layer.width * weights.blocks


def _forward_of_frozen(run: Run, weights: Weights, layer: Layer) -> dict[str, float]:
    """Count the bytes that the forward pass of a layer adds below adapters.

    XLA gathers at its start what is frozen and in no loop: the head, the layer with which the backward pass begins, and
    for either pass the layers of `model.mtp_layers`. The loop has two more layers.
    """
    gathered = 3 + 2 * run.shape.mtp_layers
    forward = 2 * layer.width * (layer.ffn + layer.whole + layer.query)
    return {
        "communication buffers": layer.input_width * gathered * layer_params(run, weights)
        + layer.width * weights.table,
        "workspace": forward + experts_forward_bytes(run),
    }


def _loss_of_modules(run: Run, weights: Weights, layer: Layer) -> dict[str, float]:
    """Count the bytes of the last module's loss of `model.mtp_layers`, which `_loss` does not count.

    The head's gradients of the losses before wait, and their hidden states' gradients. XLA has made zeros by then for
    the blocks' gradients, and gathered the layer with which their backward pass begins.
    """
    modules, trained = run.shape.mtp_layers, not run.adapter_params
    gradients = layer.width * modules * weights.table + _block_gradients(run, weights, layer)
    return {
        "gradients": trained * gradients,
        "communication buffers": layer.input_width
        * layer_params(run, weights)
        * run.lowering.gathers_ahead,
        "workspace": 2 * layer.width * modules * layer.whole,
    }


def _loss(run: Run, weights: Weights, layer: Layer) -> dict[str, float]:
    """Count the bytes of the loss: the head and its gradient, and the exponentials of a chunk of logits.

    The gradient of the head is in float32 if chunks add to it; that of one chunk comes when the head has gone. The
    hidden states are there gathered, scaled, and as gradients; with several chunks also cut. The layer with which the
    backward pass begins is gathered ahead.
    """
    chunks, exponentials = loss_chunks(run)
    prefetched = run.lowering.gathers_ahead and run.microbatches == 1
    prefetched_layer = layer.input_width * layer_params(run, weights) * prefetched
    head = 0 if run.zero < 3 and run.microbatches > 1 else weights.table  # `sums` has it then
    gradient = 4 * weights.table if chunks > 1 else layer.width * (weights.table - head)
    parts = {
        "gradients": gradient * (not run.adapter_params),
        "activations: logits": exponentials,
        "communication buffers": prefetched_layer,
        "workspace": layer.width * (head + (4 if chunks > 1 else 3) * layer.whole),
    }
    if run.teaches:
        alone = run.of_reference
        parts["workspace"] += layer.width * (weights_of(alone).table + layer_of(alone).whole)
    if run.shape.mtp_layers:
        parts["communication buffers"] = 0
        for name, size in _loss_of_modules(run, weights, layer).items():
            parts[name] += size
    return parts


def _scatter(weights: Weights) -> dict[str, float]:
    """Count the bytes of zero 2's scatter after a micro-batch: its gradients, and the one that leaves, transposed."""
    return {
        "gradients": 2 * weights.blocks + 4 * weights.table,
        "communication buffers": 2
        * (weights.layers * max(weights.matrix, weights.routed) + weights.table),
    }


def timeline(run: Run) -> list[tuple[str, int]]:
    """Count the bytes at the moments of one step and of the next.

    The state has its moments from the start and the step is one program, so the second step is as high as the first.
    """
    weights = weights_of(run)
    start, waiting = sum(state(run, weights).values()), least_bytes(run)
    peak = breakdown(run).peak_bytes
    return [
        ("model init", int(start)),
        ("accumulators", int(waiting)),
        ("forward-backward peak", peak),
        ("optimizer step", int(start + 4 * trained_params(run, weights))),
        ("second forward-backward peak", peak),
    ]


def fits_host(run: Run, gpu: Gpu) -> bool:
    """Return whether the host of `gpu` has the memory for the tensors that `run` offloads."""
    return host_bytes(run) <= gpu.usable_host_bytes
