"""Read cuDNN's attention calls of a program: their scores, mask, packed documents and workspace."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ultrascale_jax.hlo.program import Array, Instruction, Module


@dataclass(frozen=True)
class AttentionCall:
    """One call, forward or backward."""

    instruction: Instruction
    operands: tuple[Array, ...]

    @cached_property
    def scores(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        shape = r'"intermediate_tensor_shape":.*?"dimensions": *\[([\d", ]+)\]'
        match = re.search(shape, self.instruction.attributes)
        assert match  # every such call has them
        batch, heads, queries, keys = map(int, re.findall(r"\d+", match[1]))
        return batch, heads, queries, keys

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.operands[0].dims[-1]

    @property
    def backward(self) -> bool:
        """Whether the call computes gradients."""
        return "Backward" in self.instruction.attributes

    @property
    def products(self) -> int:
        """Matrix products over the scores: two, backward five."""
        return 5 if self.backward else 2

    @property
    def causal(self) -> bool:
        """Whether a query sees no later keys."""
        return bool(re.search(r'"mask_type": *"[A-Z_]*CAUSAL', self.instruction.attributes))

    @property
    def by_lengths(self) -> bool:
        """Whether a row has a number of queries and one of keys, and else is empty: a ring's block within documents."""
        return bool(re.search(r'"mask_type": *"PADDING"', self.instruction.attributes))

    @property
    def window(self) -> int | None:
        """Most keys that a query sees; None without a sliding window."""
        return self._number("sliding_window_length") or None

    @property
    def segments(self) -> int:
        """Documents in a row that the call has room for; 1 unless they are packed."""
        return self._number("max_seg_per_batch") or 1

    @property
    def mask_bytes(self) -> int:
        """Size of the arrays that hold a value for each score: a mask of documents, for one."""
        biased = "fmhaScaleBias" in self.instruction.attributes
        return sum(a.bytes for a in self.operands if a.dims[-2:] == self.scores[2:]) * biased

    @property
    def workspace_bytes(self) -> int:
        """Known workspace of a backward call: the queries' gradients in float32, and a float32 of each query.

        Both are for every segment at full length (cuDNN 9; `get_fe_workspace_size_node` of
        scaled_dot_product_flash_attention.h in NVIDIA/cudnn-frontend 1.12 to 1.23). A forward call has none.
        """
        batch, heads, queries, _ = self.scores
        return 4 * self.segments * batch * heads * queries * (self.head_dim + 1) * self.backward

    def _number(self, name: str) -> int:
        match = re.search(rf'"{name}": *"?(\d+)', self.instruction.attributes)
        return int(match[1]) if match else 0


def attention_call(module: Module, computation: str, i: Instruction) -> AttentionCall | None:
    """Return `i` of `computation` as a call of cuDNN's attention; None if it is none."""
    if "cudnn$fmha" not in i.attributes:
        return None
    named = module.by_name[computation]
    return AttentionCall(i, tuple(named[name].arrays[0] for name in i.operands))


def attention_calls(module: Module) -> Iterator[AttentionCall]:
    """Yield all calls of attention, a loop's once."""
    for computation, body in module.computations.items():
        for i in body:
            if call := attention_call(module, computation, i):
                yield call


def unplanned_workspace(module: Module) -> int:
    """Return the largest workspace of the calls that the text, made without a device, has as `u8[0]`.

    This is a lower bound: cuDNN may choose a kernel that needs more, and only cuDNN on a device can say how much.
    """
    calls = attention_calls(module)
    unplanned = (call for call in calls if not call.instruction.arrays[-1].bytes)
    return max((call.workspace_bytes for call in unplanned), default=0)
