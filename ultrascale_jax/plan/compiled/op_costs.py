"""Time each instruction of a scheduled program on a GPU.

Matrix products and attention are timed by their shapes (`costs.py`), whatever kernel the text names: without a GPU XLA
has not chosen one yet. Everything else is timed by the bytes it really touches, not by the size of its operands: a
fusion that reads one layer of a stack, or updates one in place, moves that layer.

XLA writes its own estimate next to a fusion (`reification_cost`) if compiled with `xla_gpu_collect_cost_model_stats`.
Only its arithmetic is taken, as a lower bound: it knows the cost of an exponential or a cosine. Its memory time is not:
it assumes peak bandwidth and charges broadcast operands as if every read went to memory (2.3 times the bytes of a
rotary embedding, 1.6 times for a norm's backward pass, in the Llama-3-8B step). Nor are its times of matrix
products, 18 to 150 times what the peak allows.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from ultrascale_jax.hlo import Dot, Instruction, Module
from ultrascale_jax.hlo.attention import AttentionCall, attention_call, attention_calls
from ultrascale_jax.hlo.classes import ELSEWHERE, Kernel, Kind, block_of, kernel_of, kind_of
from ultrascale_jax.hlo.memory_traffic import touched
from ultrascale_jax.parallel.context.document_loops import shared_tokens
from ultrascale_jax.plan.flops import mean_keys
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Work of the GPU for one instruction."""

    kind: Kind
    seconds: float
    flops: float = 0.0
    """Operations of matrix products and attention, the masked half not counted."""
    host_bytes: int = 0
    """Read and written in the host's memory."""
    kernel: Kernel = "other"
    block: str = ELSEWHERE
    """Class of the kernel and block of the model (`hlo/classes.py`)."""


@dataclass(frozen=True)
class Operations:
    """The operations of `module` on `gpu`."""

    module: Module
    gpu: Gpu
    document_tokens: int | None = None
    """Length of all packed documents; none is a full row."""

    @cached_property
    def _packed_lengths(self) -> list[int]:
        """The longest document of each class that attention takes in a call of its own."""
        calls = attention_calls(self.module)
        return sorted({call.scores[3] for call in calls if call.segments > 1})

    @cached_property
    def _chunk(self) -> int | None:
        """Keys of a ring's block within documents; None without such blocks."""
        calls = attention_calls(self.module)
        return next((call.scores[3] for call in calls if call.by_lengths), None)

    @cached_property
    def _known(self) -> dict[tuple[str, str], Operation | None]:
        return {}

    def find(self, computation: str, instruction: Instruction) -> Operation | None:
        """Return the work for an instruction that is no collective; none: it takes no time."""
        key = computation, instruction.name
        if key not in self._known:
            op = self._operation(computation, instruction)
            if op is not None:
                kernel = kernel_of(self.module, instruction, op.kind)
                op = replace(op, kernel=kernel, block=block_of(self.module, instruction))
            self._known[key] = op
        return self._known[key]

    def _operation(self, computation: str, i: Instruction) -> Operation | None:
        kind = kind_of(self.module, computation, i)
        if kind is None:
            return None
        device, host = touched(self.module, computation, i)
        if call := attention_call(self.module, computation, i):
            return self._attention(call)
        if kind == "gemm":
            return _products(self.gpu, i, self.module.dots(i, computation), device)
        memory = costs.memory_seconds(self.gpu, device)
        pcie = costs.host_seconds(self.gpu, host)
        seconds = costs.LAUNCH_S + max(memory, pcie, arithmetic_seconds(i))
        return Operation(kind="other", seconds=seconds, host_bytes=host)

    def _attention(self, call: AttentionCall) -> Operation:
        """Time attention, and one pass over what the causal mask leaves of an array that masks documents.

        That is a bound from below: every head may read the array again.
        """
        if call.segments > 1:
            return self._packed_attention(call)
        flops = attention_flops(call, self._shared_keys(call) if call.by_lengths else None)
        seconds = self._attention_seconds(call, flops)
        if call.mask_bytes:
            masked = seen_keys(call) / call.scores[3] * call.mask_bytes
            seconds += costs.memory_seconds(self.gpu, masked)
        return Operation(kind="attention", seconds=seconds, flops=flops)

    def _shared_keys(self, call: AttentionCall) -> float:
        """Return the keys that a query sees on average in a tile of a ring's block, whose last tile may not be full."""
        _, _, queries, chunk = call.scores
        shared = shared_tokens(chunk, self.document_tokens)
        return shared * shared / (-(-shared // queries) * queries)

    def _packed_attention(self, call: AttentionCall) -> Operation:
        """Time the call of one class of documents; all documents have the same length, so one class has all the work.

        The backward pass of each clears the float32 gradients of all its segments.
        """
        seconds = costs.LAUNCH_S + costs.memory_seconds(self.gpu, call.workspace_bytes)
        tokens, cut = min(self.document_tokens or math.inf, self._packed_lengths[-1]), 0.0
        if self._chunk is not None and self.document_tokens is not None:
            # The borders of a ring's chunks cut documents: blocks of two chunks have the other part.
            tokens = min(tokens, self._chunk)
            cut = shared_tokens(self._chunk, int(tokens)) ** 2 / self._chunk
            cut *= self.document_tokens < self._chunk
        flops = 0.0
        if call.scores[3] == min(length for length in self._packed_lengths if length >= tokens):
            flops = attention_flops(call, mean_keys(int(tokens), None) - cut)
            seconds += self._attention_seconds(call, flops)
        return Operation(kind="attention", seconds=seconds, flops=flops)

    def _attention_seconds(self, call: AttentionCall, flops: float) -> float:
        return costs.attention_seconds(
            self.gpu, flops, backward=call.backward, head_dim=call.head_dim
        )


def _products(gpu: Gpu, i: Instruction, dots: list[Dot], device: int) -> Operation:
    """Time the matrix products, and operations fused with them (such as a residual) where those move more bytes."""
    scratch = sum(array.bytes for array in i.arrays[1:] if array.dtype in ("s8", "u8"))
    moved = sum(2 * dot.batch * (dot.m * dot.k + dot.k * dot.n + dot.m * dot.n) for dot in dots)
    fused = costs.memory_seconds(gpu, max(0, device - scratch - moved))
    seconds = sum(
        costs.gemm_seconds(gpu, dot.m, dot.n, dot.k, _precision(dot.dtype), dot.batch)
        for dot in dots
    )
    return Operation(
        kind="gemm",
        seconds=seconds + fused,
        flops=sum(dot.flops for dot in dots),
    )


def arithmetic_seconds(instruction: Instruction) -> float:
    """Return XLA's estimate of a fusion's arithmetic; 0 if the text has none.

    The record without a name counts the arithmetic of a Triton fusion (`kCustom`) for every tile as if it were the
    whole array, so there only XLA's model of tiles is used.
    """
    match = re.search(r'"reification_cost":(\[[^\]]*\])', instruction.attributes)
    records = {record["name"]: record for record in json.loads(match[1])} if match else {}
    tiled = "kind=kCustom" in instruction.attributes
    record = records.get("indexing-cost-model" if tiled else "")
    return record["compute_time_us"] * 1e-6 if record else 0.0


def seen_keys(call: AttentionCall) -> float:
    """Return the keys that a query sees on average."""
    keys = call.scores[3]
    return mean_keys(keys, call.window) if call.causal else float(keys)


def attention_flops(call: AttentionCall, seen: float | None = None) -> float:
    """Count the FLOPs of all products over the scores; a query sees `seen` keys, by default the mask's."""
    batch, heads, queries, _ = call.scores
    seen = seen_keys(call) if seen is None else seen
    return call.products * 2.0 * batch * heads * queries * seen * call.head_dim


def _precision(dtype: str) -> str:
    """Return the precision of `Gpu.peak_flops` for an element type; float32 products run as TF32."""
    if dtype.startswith("f8"):
        return "fp8"
    return "bf16" if dtype in ("bf16", "f16") else "fp32"
