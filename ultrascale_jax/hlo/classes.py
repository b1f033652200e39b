"""Classify the instructions of a scheduled program: their kind of kernel, and the block of the model that they compute.

The planner times them by kind (`plan/compiled/op_costs.py`), and a profile adds them up by kind and block
(`plan/profile/`), so that prediction and measurement mean the same.
"""

import re
from typing import Literal

from ultrascale_jax.hlo.collectives import FREE
from ultrascale_jax.hlo.program import Instruction, Module, is_heavy

Kind = Literal["gemm", "attention", "other"]
"""A matrix product, cuDNN's attention, or any other work."""

Kernel = Literal[Kind, "copy"]
"""The same, with `copy` for other work that only moves data."""

COPIES = frozenset(
    "bitcast broadcast concatenate constant copy copy-start dynamic-slice dynamic-update-slice get-tuple-element iota "
    "pad parameter reshape reverse slice slice-start transpose tuple".split()
)
"""Opcodes that move data and compute nothing."""

BLOCKS = (
    "embedding",
    "attention",
    "mlp",
    "moe",
    "norm",
    "layers",
    "loss",
    "mtp",
    "gradients",
    "optimizer",
    "pipeline",
)
"""Named scopes (`jax.named_scope`) of the training step. Outside of its halves a layer, `layers`, slices and gathers
parameters; `pipeline` is the executor's sends and buffers, `gradients` their reduction and norm."""

ELSEWHERE = "elsewhere"
"""The block of an instruction without any of these scopes, or without a name."""

SCOPE = re.compile(rf"(?:^|[/(])({'|'.join(BLOCKS)})(?=[/)]|$)")


def kind_of(module: Module, computation: str, i: Instruction) -> Kind | None:
    """Return the kind of work of an instruction that is no collective; None: it takes no time on the device."""
    if (
        i.opcode in FREE
        or i.opcode.endswith(("-done", "-update"))
        or "AllocateBuffer" in i.attributes
    ):
        return None
    if "cudnn$fmha" in i.attributes:
        return "attention"
    return "gemm" if is_heavy(i, module.heavy) and module.dots(i, computation) else "other"


def kernel_of(module: Module, i: Instruction, kind: Kind) -> Kernel:
    """Return the class of the kernel of an instruction of this kind."""
    return "copy" if kind == "other" and copies_only(module, i) else kind


def copies_only(module: Module, i: Instruction) -> bool:
    """Return whether an instruction, or every one in its fusion, moves data and computes nothing."""
    if i.opcode.startswith(("fusion", "async-start")):
        return all(
            inner.opcode in COPIES for name in i.called for inner in module.computations[name]
        )
    return i.opcode in COPIES


def block_of(module: Module, i: Instruction) -> str:
    """Return the innermost of `BLOCKS` in the place of an instruction, as `jit(f)/jvp(layers)/attention/dot_general`.

    Where XLA joined several instructions into one, `(a/x:b/y)`, the first counts. A fusion without a name has the
    name of its last instruction with one.
    """
    inside = [inner.op_name for name in i.called for inner in module.computations.get(name, ())]
    name = i.op_name or next(filter(None, reversed(inside)), "")
    blocks = SCOPE.findall(name.partition(":")[0])
    return blocks[-1] if blocks else ELSEWHERE
