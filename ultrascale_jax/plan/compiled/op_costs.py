"""Time each instruction of a scheduled program on a GPU.

Matrix products and attention are timed by their shapes (`costs.py`), whatever kernel the text names: without a GPU XLA
has not chosen one yet. Everything else is timed by the bytes it really touches, not by the size of its operands: a
fusion that reads one layer of a stack, or updates one in place, moves that layer.

XLA writes its own estimate next to a fusion (`reification_cost`) if compiled with `xla_gpu_collect_cost_model_stats`.
Of that only the arithmetic is taken, as a lower bound: it knows how dear an exponential or a cosine is. Its memory time
is not: it assumes peak bandwidth and charges broadcast operands as if every read went to memory (2.3 times the bytes
of a rotary embedding, 1.6 times those of a norm's backward pass, in the Llama-3-8B step). Nor are its times of matrix
products, 18 to 150 times what the peak allows.
"""

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ultrascale_jax.hlo import Dot, Instruction, Module, is_heavy
from ultrascale_jax.hlo.collectives import FREE
from ultrascale_jax.hlo.memory_traffic import touched
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.training.flops import mean_keys


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Work of the GPU for one instruction."""

    kind: Literal["gemm", "attention", "other"]
    seconds: float
    flops: float = 0.0
    """Operations of matrix products and attention, the masked half not counted."""
    device_bytes: int = 0
    """Read and written in the GPU's memory."""
    host_bytes: int = 0
    """Read and written in the host's memory."""


@dataclass(frozen=True)
class Operations:
    """The operations of `module` on `gpu`."""

    module: Module
    gpu: Gpu
    document_tokens: int | None = None
    """Length of all packed documents; none is a whole row."""

    @cached_property
    def _packed_lengths(self) -> list[int]:
        """The longest document of each class that attention takes in a call of its own."""
        calls = (i for body in self.module.computations.values() for i in body)
        return sorted({attention_scores(i)[0][-1] for i in calls if packed_segments(i) > 1})

    @cached_property
    def _known(self) -> dict[tuple[str, str], Operation | None]:
        return {}

    def find(self, computation: str, instruction: Instruction) -> Operation | None:
        """Return the work for an instruction that is no collective; none: it takes no time."""
        key = computation, instruction.name
        if key not in self._known:
            self._known[key] = self._operation(computation, instruction)
        return self._known[key]

    def _operation(self, computation: str, i: Instruction) -> Operation | None:
        if (
            i.opcode in FREE
            or i.opcode.endswith(("-done", "-update"))
            or "AllocateBuffer" in i.attributes
        ):
            return None
        device, host = touched(self.module, computation, i)
        if "cudnn$fmha" in i.attributes:
            return self._attention(computation, i, device)
        dots = self.module.dots(i, computation) if is_heavy(i, self.module.heavy) else []
        if dots:
            return _products(self.gpu, i, dots, device)
        memory = costs.memory_seconds(self.gpu, device)
        pcie = costs.host_seconds(self.gpu, host)
        seconds = costs.LAUNCH_S + max(memory, pcie, arithmetic_seconds(i))
        return Operation(kind="other", seconds=seconds, device_bytes=device, host_bytes=host)

    def _attention(self, computation: str, i: Instruction, device: int) -> Operation:
        """Time attention, and one pass over what the causal mask leaves of an array that masks documents.

        That is a bound from below: every head may read the array again.
        """
        if packed_segments(i) > 1:
            return self._packed_attention(computation, i, device)
        arrays = [self.module.by_name[computation][name].arrays[0] for name in i.operands]
        (*_, queries, keys), seen = attention_scores(i)
        head_dim, backward = arrays[0].dims[-1], "Backward" in i.attributes
        flops = attention_flops(i, head_dim)
        seconds = costs.attention_seconds(self.gpu, flops, backward=backward, head_dim=head_dim)
        if "fmhaScaleBias" in i.attributes:
            masks = (array.bytes for array in arrays if array.dims[-2:] == (queries, keys))
            seconds += costs.memory_seconds(self.gpu, seen / keys * sum(masks))
        return Operation(kind="attention", seconds=seconds, flops=flops, device_bytes=device)

    def _packed_attention(self, computation: str, i: Instruction, device: int) -> Operation:
        """Time the call of one class of documents; all documents have the same length, so one class has all the work.

        The backward pass of each clears the float32 gradients of all its segments.
        """
        (rows, heads, longest, _), _ = attention_scores(i)
        head_dim = self.module.by_name[computation][i.operands[0]].arrays[0].dims[-1]
        backward = "Backward" in i.attributes
        cleared = workspace_bytes(i, head_dim) if backward else 0
        seconds = costs.LAUNCH_S + costs.memory_seconds(self.gpu, cleared)
        tokens = min(self.document_tokens or math.inf, self._packed_lengths[-1])
        flops = 0.0
        if longest == min(length for length in self._packed_lengths if length >= tokens):
            products = 5 if backward else 2
            flops = (
                products * 2.0 * rows * heads * longest * mean_keys(int(tokens), None) * head_dim
            )
            seconds += costs.attention_seconds(
                self.gpu, flops, backward=backward, head_dim=head_dim
            )
        return Operation(kind="attention", seconds=seconds, flops=flops, device_bytes=device)


def _products(gpu: Gpu, i: Instruction, dots: list[Dot], device: int) -> Operation:
    """Time the matrix products, and what is fused with them (a residual, say) as far as it moves more than they do."""
    scratch = sum(array.bytes for array in i.arrays[1:] if array.dtype in ("s8", "u8"))
    own = sum(2 * dot.batch * (dot.m * dot.k + dot.k * dot.n + dot.m * dot.n) for dot in dots)
    fused = costs.memory_seconds(gpu, max(0, device - scratch - own))
    seconds = sum(
        costs.gemm_seconds(gpu, dot.batch * dot.m, dot.n, dot.k, _precision(dot.dtype))
        for dot in dots
    )
    return Operation(
        kind="gemm",
        seconds=seconds + fused,
        flops=sum(dot.flops for dot in dots),
        device_bytes=device - scratch,
    )


def arithmetic_seconds(instruction: Instruction) -> float:
    """Return XLA's estimate of a fusion's arithmetic; 0 if the text has none.

    The record without a name counts the arithmetic of a Triton fusion (`kCustom`) for every tile as if it were the
    whole array, so there only XLA's model of tiles is asked.
    """
    found = re.search(r'"reification_cost":(\[[^\]]*\])', instruction.attributes)
    records = {record["name"]: record for record in json.loads(found[1])} if found else {}
    tiled = "kind=kCustom" in instruction.attributes
    record = records.get("indexing-cost-model" if tiled else "")
    return record["compute_time_us"] * 1e-6 if record else 0.0


def attention_scores(instruction: Instruction) -> tuple[tuple[int, ...], float]:
    """Return batch, heads, queries and keys of cuDNN's attention, and the keys that a query sees on average."""
    text = instruction.attributes
    scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions": *\[([\d", ]+)\]', text)
    assert scores  # every such call has them
    dims = tuple(map(int, re.findall(r"\d+", scores[1])))
    window = re.search(r'"sliding_window_length": *"?(\d+)', text)
    if re.search(r'"mask_type": *"[A-Z_]*CAUSAL', text):
        return dims, mean_keys(dims[-1], int(window[1]) if window and int(window[1]) else None)
    return dims, float(dims[-1])


def packed_segments(instruction: Instruction) -> int:
    """Return the documents in a row for which a call of cuDNN's attention has room; 1 unless they are packed."""
    found = re.search(r'"max_seg_per_batch": *"?(\d+)', instruction.attributes)
    return int(found[1]) if found and "cudnn$fmha" in instruction.attributes else 1


def attention_flops(instruction: Instruction, head_dim: int) -> float:
    """Count the FLOPs of cuDNN's attention: two products over the scores that the mask leaves, backward five."""
    (batch, heads, queries, _), seen = attention_scores(instruction)
    products = 5 if "Backward" in instruction.attributes else 2
    return products * 2.0 * batch * heads * queries * seen * head_dim


def attention_workspace(module: Module) -> int:
    """Return the largest workspace of cuDNN's attention that the text, made without a device, has as `u8[0]`.

    That is a bound from below: the kernel that cuDNN chooses may want more; only cuDNN on a device can say how much.
    """
    sizes = [0]
    for computation, body in module.computations.items():
        for i in body:
            if (
                "cudnn$fmha" in i.attributes
                and "Backward" in i.attributes
                and not i.arrays[-1].bytes
            ):
                queries = module.by_name[computation][i.operands[0]].arrays[0]
                sizes.append(workspace_bytes(i, queries.dims[-1]))
    return max(sizes)


def workspace_bytes(backward: Instruction, head_dim: int) -> int:
    """Return the known workspace of a backward pass: the queries' gradients in float32, and a float32 of each query.

    Both are for every segment at full length (cuDNN 9; `get_fe_workspace_size_node` of
    scaled_dot_product_flash_attention.h in NVIDIA/cudnn-frontend 1.12 to 1.23).
    """
    (batch, heads, queries, _), _ = attention_scores(backward)
    return 4 * packed_segments(backward) * batch * heads * queries * (head_dim + 1)


def _precision(dtype: str) -> str:
    """Return the precision of `Gpu.peak_flops` for an element type; float32 products run as TF32."""
    if dtype.startswith("f8"):
        return "fp8"
    return "bf16" if dtype in ("bf16", "f16") else "fp32"
