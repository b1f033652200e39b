"""The playbook's benchmark: its models, its runs, and what nanotron needs of one GPU's memory.

What is kept was read off nanotron's source (github.com/huggingface/nanotron: `models/llama.py`, `models/base.py`,
`optim/`, `parallel/`; perhaps not the benchmark's own version), and five constants were fitted on half of
`tests/data/plan/playbook_runs.csv`; which five was chosen by looking at all of it. The benchmark records
`torch.cuda.max_memory_reserved()` of rank 0, which is on the first stage of a pipeline.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ultrascale_jax.cli.plan_commands.memory import MemoryModel
from ultrascale_jax.config import MeshConfig, require
from ultrascale_jax.configs.shapes import PLAYBOOK
from ultrascale_jax.plan.formulas.memory import Breakdown
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.training.model_shape import ModelShape

SEQ_LEN = 4096
"""Of every run of the benchmark, in tokens."""

CONTEXT_BYTES = int(1.5 * 2**30)
"""Memory that PyTorch cannot reserve: CUDA's context and NCCL (1 to 2 GB); the fullest run reserved 77.4 GiB."""


SHAPES = {name: ModelShape.of(model) for name, model in PLAYBOOK.items()}


def run_of(row: Mapping[str, str]) -> Run:
    """Return the run of a row of `playbook_runs.csv` (TP with sequence parallelism, 1F1B). Raises `UserError`."""
    model = row["model"]
    require(model in SHAPES, "model", model, f"choose one of {', '.join(SHAPES)}")
    zero = 1 if int(row["zero"]) else 0
    replicas = {"fsdp" if zero else "dp": int(row["dp"])}
    mesh = MeshConfig(**({"fsdp": 1} | replicas), pp=int(row["pp"]), sp=int(row["tp"]))
    return Run(
        shape=SHAPES[model],
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


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers and parameters of one pipeline rank."""

    blocks: int
    """Pieces of the model, the final norm and the logits' cast among them; nanotron cannot run with none."""
    layers: int
    embedding: bool
    head: bool
    loss: bool


def stages(shape: ModelShape, num_stages: int) -> list[Stage]:
    """Cut the model as nanotron does (`models/base.py`, `build_model`): a stage ends where it exceeds its share.

    The costs are the parameters of a layer and of the head; embedding, norm, cast and loss are free.
    """
    layer = shape.attention_params + shape.mlp_params
    head = shape.vocab_size * shape.d_model
    blocks = [("embedding", 0), *[("layers", layer)] * shape.num_layers]
    blocks += [("norm", 0), ("head", head), ("cast", 0), ("loss", 0)]
    share = (shape.num_layers * layer + head) / num_stages
    found: list[list[str]] = [[] for _ in range(num_stages)]
    rank = cost = 0
    for name, block_cost in blocks:
        cost += block_cost
        found[rank].append(name)
        if cost > share * (rank + 1) and rank < num_stages - 1:
            rank += 1
    return [
        Stage(
            blocks=len(names),
            layers=names.count("layers"),
            embedding="embedding" in names,
            head="head" in names,
            loss="loss" in names,
        )
        for names in found
    ]


@dataclass(frozen=True)
class Allocator:
    """Predict what PyTorch's caching allocator reserves for the bytes needed, by fitted constants."""

    fixed: float
    """GiB that every run has: workspaces, small tensors."""
    activations: float
    """Reserved over needed bytes of activations; the surplus is what fragmentation would do, not isolated."""
    logit: float
    """Bytes of one logit: bfloat16, float32 and softmax in float32 are 10."""
    hidden: float
    """Bytes of one value of a micro-batch's unsharded hidden state, under TP: gathered and to be scattered."""
    queue: float
    """As `hidden`, where there are several micro-batches and no pipeline.

    A reading, not a measurement: Python frees tensors that NCCL's stream still needs, and the host runs ahead of it; in
    a pipeline it waits for its neighbours at every micro-batch.
    """


FITTED = Allocator(fixed=0.135, activations=1.161, logit=9.10, hidden=6.52, queue=94.9)
"""`fit` of the calibration rows, in `tests/scripts/test_nanotron.py`, which repeats it."""


def nanotron_breakdown(
    run: Run, *, stage: int | None = None, allocator: Allocator = FITTED
) -> Breakdown:
    """Predict the memory that PyTorch reserves on one GPU of a pipeline stage; None: the stage that needs most.

    A recorded figure is stage 0's. Raises `UserError` for a run that the benchmark did not make.
    """
    _check(run)
    kinds = stages(run.shape, run.mesh.pp)
    if stage is not None:
        return _stage_breakdown(run, kinds[stage], stage, allocator)
    every = [_stage_breakdown(run, kind, rank, allocator) for rank, kind in enumerate(kinds)]
    return max(every, key=lambda one: one.peak_bytes)


def _check(run: Run) -> None:
    mesh = run.mesh
    fix = "the playbook's nanotron shards by ZeRO 0 or 1 only"
    require(run.zero <= 1, "train.zero", run.zero, fix)
    fix = "the playbook's nanotron recomputes nothing; use none"
    require(run.remat == "none", "train.remat", run.remat, fix)
    fix = "the playbook's nanotron runs 1f1b with one stage a rank"
    chosen = (run.schedule, run.virtual_stages)
    require(mesh.pp == 1 or chosen == ("1f1b", 1), "schedule", run.schedule, fix)
    fix = "the playbook's nanotron has no such axis; its tensor parallelism is sp"
    for axis in ("ep", "cp", "tp"):
        require(mesh.sizes[axis] == 1, f"mesh.{axis}", mesh.sizes[axis], fix)
    fix = "the playbook's nanotron trained dense models in bfloat16"
    require(run.shape.experts is None, "model.experts", run.shape.experts, fix)
    require(run.precision == "bf16", "train.precision", run.precision, fix)


def usable_bytes(gpu: Gpu) -> int:
    """Return the bytes of a GPU that PyTorch can reserve; `nanotron_breakdown` includes fragmentation."""
    return int(gpu.memory_gib * 2**30) - CONTEXT_BYTES


def nanotron_timeline(run: Run) -> list[tuple[str, int]]:
    """Return the fullest stage's bytes at the moments of one step and the next, as the playbook's `predict_memory`.

    Moments are there from the first optimizer step on, so the second step needs more than the first.
    """
    parts = nanotron_breakdown(run).parts
    names = ("parameters", "master copy", "accumulation buffer")
    whole, moments = sum(parts.values()), parts["optimizer state"]
    waiting = sum(parts[name] for name in names)
    return [
        ("model init", int(parts["parameters"])),
        ("accumulators", int(waiting)),
        ("forward-backward peak", int(whole - moments)),
        ("optimizer step", int(waiting + moments)),
        ("second forward-backward peak", int(whole)),
    ]


def least_bytes(run: Run) -> int:
    """Return a lower bound without fitted constants: weights, optimizer, saved activations, float32 logits twice."""
    return nanotron_breakdown(run, allocator=Allocator(0, 1, 8, 0, 0)).peak_bytes


MEMORY = MemoryModel(
    breakdown=nanotron_breakdown,
    timeline=nanotron_timeline,
    usable_bytes=usable_bytes,
    in_flight=lambda run: min(run.microbatches, run.mesh.pp),
)
"""For `python -m scripts.plan memory --software nanotron`."""


def _stage_breakdown(run: Run, stage: Stage, rank: int, allocator: Allocator) -> Breakdown:
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
    owned = n / (run.shards if run.zero else 1)

    tokens = run.sequences * run.seq_len
    a_layer = 2 * stage.layers * tokens / mesh.tensor
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    activations = {
        "activations: norms": a_layer * 4 * shape.d_model,
        "activations: attention": a_layer * heads,
        "activations: mlp": a_layer * (4 if shape.gated else 2) * shape.d_ff,
    }
    in_flight = min(run.microbatches, mesh.pp - rank)
    one = sum(activations.values())
    hidden = tokens * shape.d_model if mesh.tensor > 1 else 0
    ahead = hidden if mesh.pp == 1 and run.microbatches > 1 else 0
    logits = tokens * shape.vocab_size / mesh.tensor if stage.head or stage.loss else 0
    return Breakdown(
        {
            "parameters": 2 * n,
            "master copy": 4 * owned,
            "gradients": 2 * n,
            "accumulation buffer": 4 * n,
            "optimizer state": 8 * owned,
            **activations,
            "activations: logits": allocator.logit * logits,
            "pipeline in flight": (in_flight - 1) * one,
            "communication buffers": allocator.hidden * hidden + allocator.queue * ahead,
            "fragmentation": (allocator.activations - 1) * in_flight * one,
            "workspace": allocator.fixed * 2**30,
        }
    )
