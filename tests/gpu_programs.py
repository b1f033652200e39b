"""Small runs compiled for H100s that are not there: a run is a mesh and what a test varies."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    Experts,
    Fp8Config,
    Keep,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.hlo.collectives import Collective
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.plan.compiled.compile import CompiledStep, compile_step
from ultrascale_jax.plan.formulas.costs import ring_bytes

MODEL = ModelConfig(
    vocab_size=1024, d_model=512, d_ff=1536, num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64
)
NAMED = Keep(saved=("q", "k", "v", "attn_core"), offloaded=("gate", "up"))
"""A policy that keeps some tensors on the device and others on the host."""
LLAMA3_8B = Config(
    model=shapes.LLAMA3_8B,
    mesh=MeshConfig(fsdp=8),
    data=DataConfig(seq_len=8192, document_mask=False),
    train=TrainConfig(global_batch=16, remat="full"),
)
LAYERS = 2
"""Layers in one iteration of the loops of a prefetching step (`parallel/prefetch.py`), which XLA unrolls."""
# cuBLAS calls instead of Triton kernels: nothing to generate, so a compilation takes a third of the time.
FAST = {"xla_gpu_enable_triton_gemm": "false"}
# Kernels that nobody runs: an assembler that writes nothing, and fewer passes before it. The text of the program is the
# same.
NO_MACHINE_CODE = {
    "xla_gpu_cuda_data_dir": str(Path(__file__).parent / "fixtures" / "no_machine_code"),
    "xla_llvm_disable_expensive_passes": "true",
}


SCALARS = 64
"""Loss, norm and counts travel too; anything below so many bytes is one of them."""


@functools.cache
def compile_once(
    cfg: Config, num_devices: int, options: tuple = (), gpu: str = "h100"
) -> CompiledStep:
    """`compile_step`, once for all tests of a file; `options` are pairs."""
    flags = NO_MACHINE_CODE | dict(options)
    return compile_step(cfg, num_devices, gpu, estimates=False, options=flags)


def compiled(
    num_devices: int,
    mesh: dict[str, int],
    *,
    pp: Mapping[str, Any] | None = None,
    cp: Mapping[str, Any] | None = None,
    moe: Mapping[str, Any] | None = None,
    fp8: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
    experts: Experts | None = None,
    model: ModelConfig = MODEL,
    seq_len: int = 512,
    gpu: str = "h100",
    **train,
) -> tuple[Config, CompiledStep]:
    """A small run, checked, and its step on GPUs."""
    cfg = Config(
        model=dataclasses.replace(model, experts=experts),
        mesh=MeshConfig(**mesh),
        pp=PipelineConfig(**pp or {}),
        cp=ContextConfig(**cp or {}),
        moe=MoEConfig(**moe or {}),
        fp8=Fp8Config(**fp8 or {}),
        optim=OptimConfig(**optim or {}),
        data=DataConfig(seq_len=seq_len, document_mask=False),
        train=TrainConfig(**{"global_batch": 2 * num_devices, "remat": "full"} | train),
    )
    return cfg.check(num_devices), compile_once(cfg, num_devices, tuple(FAST.items()), gpu)


def matrices(cfg: Config) -> dict[str, int]:
    """Elements of each matrix of a block."""
    m = cfg.model
    q, kv, ffn = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim, m.d_ff
    widths = {"w_q": q, "w_k": kv, "w_v": kv, "w_o": q, "w_gate": ffn, "w_up": ffn, "w_down": ffn}
    return {name: m.d_model * width for name, width in widths.items()}


def layer_loops(step: CompiledStep, cfg: Config) -> tuple[list[Collective], list[Collective]]:
    """Collectives of the forward and of the backward scan over the layers, of `LAYERS` each; the backward one has more
    matmuls."""
    trips = (cfg.model.num_layers // LAYERS,)
    bodies = {name: loops for name, loops in step.module.walk() if loops[-1:] == trips}
    work = {name: sum(m.computation == name for m in step.matmuls) for name in bodies}
    forward, backward = sorted((name for name in bodies if work[name]), key=work.__getitem__)
    return tuple(
        [c for c in step.collectives if c.computation == name] for name in (forward, backward)
    )


def pick(collectives: list[Collective], kind: str, *axes: str) -> list[Collective]:
    """Select collectives of one kind over exactly these axes that carry more than scalars."""
    return [
        c for c in collectives if c.kind == kind and c.axes == axes and c.operand_bytes > SCALARS
    ]


HOPS = 3
"""Of a ring's loops: forward, backward keys, and backward the sums."""


def hops_beside_attention(step) -> int:
    """Count the sends of a ring's loops, all of which must have attention between start and end."""
    assert sends(step) and all(c.asynchronous for c in sends(step))
    attention = {m.name for m in step.matmuls if m.attention}
    count, depth = 0, max(len(loops) for _, loops in step.module.walk())
    for computation, loops in step.module.walk():
        body = step.module.computations[computation]
        places = {instruction.name: place for place, instruction in enumerate(body)}
        for end in body:
            if end.opcode == "collective-permute-done":
                between = {i.name for i in body[places[end.operands[0]] : places[end.name]]}
                hops = len(loops) == depth  # inside those over micro-batches and layers
                assert not hops or between & attention, end.name
                count += hops
    return count


def sends(step: CompiledStep) -> list[Collective]:
    """Select what stages of a pipeline, and ranks of a ring, send to the next."""
    return [c for c in step.collectives if c.kind == "collective-permute"]


def steady_sends(table: Schedule, step: CompiledStep) -> list[Collective]:
    """Select the sends of the loop whose ticks run forward and backward."""
    both = sum({"F", "B"} <= {k for cell in row for k in cell} for row in table.ticks)
    return [c for c in sends(step) if c.loops == (both,)]


def sent_bytes(
    step: CompiledStep, groups: Iterable[tuple[str, ...]]
) -> dict[tuple[str, ...], float]:
    """Add up what a device sends in a step along each of `groups` of axes.

    A collective over other axes counts with the first group that has them all, or else with that of its first axis.
    """
    sent = dict.fromkeys(groups, 0.0)
    for c in step.collectives:
        holding = [group for group in sent if {*c.axes} <= {*group}]
        holding += [group for group in sent if c.axes[0] in group]
        along = c.axes if c.axes in sent else holding[0]
        size = max(c.operand_bytes, c.result_bytes)
        if c.kind != "collective-permute":
            size = ring_bytes(c.kind, size, len(c.groups[0]))
        sent[along] += c.times * size
    return sent


MATRICES = 7
"""Of a layer: q, k, v, o, gate, up, down."""

HEAD = 5
"""Products of the head, in bfloat16: logits and two gradients, and twice the logits in the loop of `models/loss.py`
that runs where a target is far below the highest logit."""


def gemms(step: CompiledStep) -> list[str]:
    """cuBLASLt's products in the text of the program; a loop's are there once."""
    return [line for line in step.text.splitlines() if 'target="__cublas' in line]


def fp8_products(step: CompiledStep) -> dict[str, int]:
    """Count cuBLASLt's products by their type."""
    low = sum("$f8" in line for line in gemms(step))
    return {"fp8": low, "bf16": len(gemms(step)) - low}
