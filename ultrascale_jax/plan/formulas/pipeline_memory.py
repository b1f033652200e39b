"""Predict the memory of a pipeline without its state, from the slots of the executor's buffers; no JAX.

Between ticks there are the parameters as they are used, float32 sums of gradients, and ring buffers, each with one slot
more than the table needs, for idle ranks (`parallel/pipeline/executor.py`). Within a tick the largest moment is in the
loop over layers or in the loss. As in `memory.py` every term is a buffer of XLA's program;
`docs/planning/pipelines.csv` compares the sums with XLA's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ultrascale_jax.plan.formulas import pipeline
from ultrascale_jax.plan.formulas.activations import (
    Layer,
    document_mask,
    experts_forward_bytes,
    kept_bytes,
    layer_of,
    loss_chunks,
    mtp_saved_bytes,
    working_set,
)
from ultrascale_jax.plan.formulas.parameters import (
    Weights,
    expert_matrices,
    gathered_in_fp8,
    layer_params,
    sharded_params,
    trained_params,
    weights_of,
)
from ultrascale_jax.plan.workload import Run, of_sizes


@of_sizes
def sums(run: Run) -> dict[str, float]:
    """Count parameters in the type of compute, gathered once a step with zero < 3, and float32 sums of gradients."""
    weights, layer = weights_of(run), layer_of(run)
    whole = weights.blocks + weights.tables
    # The base of adapters is stored in the type of compute.
    cast = (run.precision != "fp32" and not run.adapter_params) or 0 < run.zero < 3
    used = cast * (sharded_params(run, weights) if run.zero == 3 else whole)
    if layer.width == run.weight_bytes and run.zero in (0, 3):
        used -= cast * sharded_params(run, weights, tables=False)
    summed = sharded_params(run, weights) if run.zero >= 2 else whole
    if run.adapter_params:
        summed = trained_params(run, weights)
    return {
        "compute parameters": layer.width * used
        - (layer.width - 1) * gathered_in_fp8(run, weights),
        "accumulation buffer": 4 * summed,
    }


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The work of one rank of a pipeline, and the part of its memory that it uses."""

    rank: int
    layers: int
    """Layers of the model, without padding."""
    in_flight: float
    """Micro-batches that it keeps at once for their backward pass."""
    used_bytes: int
    """Bytes at the peak without the slots for `in_flight` that it never fills; all ranks run one program, so they have
    the same buffers."""


def by_rank(run: Run, parts: Mapping[str, float]) -> list[RankMemory]:
    """Say what each rank uses of the `parts` at the peak, which are the same on all; empty without a pipeline."""
    if run.mesh.pp == 1:
        return []
    chunks = pipeline.counts(run).in_flight
    kept = kept_bytes(run.by_policy) if run.stash == "residuals" else {"stage inputs": 0}
    filled = sum(parts.get(f"activations: {name}", 0) for name in kept)
    most, every = max(chunks.values()), sum(parts.values())
    return [
        RankMemory(
            rank=rank,
            layers=layers,
            in_flight=chunks[rank] / run.virtual_stages,
            used_bytes=int(every - (1 - chunks[rank] / most) * filled),
        )
        for rank, layers in enumerate(pipeline.rank_layers(run))
    ]


def ring_buffers(run: Run, layer: Layer) -> dict[str, float]:
    """Count the ring buffers, and the values of this tick."""
    slots, stashes = pipeline.counts(run).slots, run.stash == "residuals"
    chunks = slots["residuals"] + 1 if stashes else 0
    parts = _saved(run, chunks)
    sent = slots["inputs"] + slots["gradients"] + 2 + (2 if stashes else 3)
    parts["activations: stage inputs"] = sent * layer.width * layer.residual
    if slots["weights"]:
        stage = sum(count * w_queue_bytes(policy_run, layer) for policy_run, count in run.by_policy)
        parts["activations: W queue"] = (slots["weights"] + 1) * stage
    return parts


def _saved(run: Run, chunks: int) -> dict[str, float]:
    """Count the bytes that `chunks` stages keep, by kind."""
    kept = kept_bytes(run.by_policy)
    return {f"activations: {name}": chunks * size for name, size in kept.items()}


def w_queue_bytes(run: Run, layer: Layer) -> float:
    """Count the bytes of one layer's waiting weight gradients: what its products read, and their cotangents.

    The product of gate and up is computed again, except where it is kept. The norms' results wait as they are kept:
    with `none` gathered, with `dots` as the norms' float32 inputs.
    """
    if len(run.kinds) > 1:
        return sum(share * w_queue_bytes(one, layer_of(one)) for one, share in run.kinds)
    a = layer.width
    norms = {"none": a * layer.whole, "dots": 4 * layer.residual}.get(
        str(run.policy), a * layer.residual
    )
    wide = 3 if run.policy == "none" else 4
    values = 2 * (layer.residual + layer.query + layer.key) + wide * layer.ffn
    return 2 * norms + a * values


def overlaps_passes(run: Run) -> bool:
    """Return whether a tick has forward and backward passes, of different stages."""
    ticks = pipeline.counts(run).ticks
    return ticks["F"] + ticks["B"] > ticks["all"]


def moments(run: Run, weights: Weights, layer: Layer) -> list[dict[str, float]]:
    """Count the bytes at the moments that may need most.

    If all forward passes come first, the sums of the layers' gradients are not there yet in the loss.
    """
    head = _head(run)
    if run.head_modules:
        head = _with_modules(run, head, layer)
    living = sums(run) | ring_buffers(run, layer)
    loss = living | head
    if not overlaps_passes(run):
        tables = (
            weights.tables
            if run.zero < 2
            else sharded_params(run, weights) - sharded_params(run, weights, tables=False)
        )
        loss["accumulation buffer"] = 4 * tables * (not run.adapter_params)
    return [living | _layers(run, weights, layer), loss]


def _layers(run: Run, weights: Weights, layer: Layer) -> dict[str, float]:
    """Count the backward pass of one layer, and the forward pass of another where a tick has both.

    Under ZeRO-3 they gather their matrices one by one, a layer's together. A gradient is added to its sum as it comes.
    A stage of which the input alone is stashed has its forward pass repeated.
    """
    a, both = layer.width, overlaps_passes(run)
    params = layer_params(run, weights)
    query = max(layer_of(one).query for one, _ in run.kinds)
    forward = 2 * a * (layer.ffn + layer.whole + query) + experts_forward_bytes(run)
    copies = a * expert_matrices(run) * weights.routed
    working = max(working_set(policy_run) for policy_run, _ in run.by_policy)
    return {
        "communication buffers": a * params if run.zero == 3 and run.shards > 1 else 0,
        "workspace": working + both * forward + copies,
        "activations: document mask": (1 + both) * document_mask(run),
        **(_saved(run, 1) if run.stash == "input" else {}),
    }


@of_sizes
def _head(run: Run) -> dict[str, float]:
    """Count the loss: a chunk of logits' exponentials, the head and its gradient, the embedding."""
    layer, table, (chunks, exponentials) = layer_of(run), weights_of(run).table, loss_chunks(run)
    a, gathers = layer.width, 2 if run.zero == 3 and run.shards > 1 else 0
    return {
        "communication buffers": gathers * a * table,
        "gradients": (4 if chunks > 1 else a) * table * (not run.adapter_params),
        "activations: logits": exponentials,
        "workspace": 4 * a * layer.whole,
    }


def _with_modules(run: Run, head: dict[str, float], layer: Layer) -> dict[str, float]:
    """Return `head` with the modules of `model.mtp_layers`, which have the last layer's policy."""
    last = run.by_policy[-1][0]
    kept = sum(kept_bytes([(last, 1)]).values()) + mtp_saved_bytes(last, layer)
    return head | {
        "activations: mtp": run.head_modules * kept,
        "workspace": head["workspace"] + working_set(last),
    }
