"""The Ultra-Scale Playbook's own formulas (huggingface.co/spaces/nanotron/ultrascale-playbook, 19 February 2025).

They are for GPT-like models in mixed precision and come out as the playbook's figures; `memory.py` is what this
project's trainer needs. Letters are the playbook's: L layers, h hidden size, s sequence length, b micro-batch, a heads,
v vocabulary, t tensor parallelism, p pipeline stages, m micro-batches. Sizes are bytes unless said otherwise.
"""

from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config import require

Recompute = Literal["none", "selective", "full"]

ERRATA = {
    "bytes": "Appendix A3 divides elements by bytes a second; in bfloat16 the communication takes twice as long.",
    "num_params": "A3's ratio for data parallelism keeps num_params, which stands above and below and cancels.",
    "optimizer 8": "The plots of memory draw the optimizer state with 8 bytes a parameter; the text's k is 12.",
    "dropout": "The figure of full recomputation also counts the input's dropout mask, one byte a value.",
    "widget size": "The widget counts 12 h^2 parameters a layer: 6.97e9 for Llama-3-8B, which has 8.03e9.",
    "widget tensor parallel": "The widget does not divide parameters by the tensor-parallel size.",
    "widget accumulation": "The widget has no float32 sums of gradients, which nanotron always keeps.",
    "experts": "The cheat-sheet divides expert parallelism's ratio by the number of experts, which cancels.",
}
"""Errors and gaps of the playbook, by name; some are in its discussions 86, 104, 122, 125, 126."""


def num_params(layers: int, h: int, v: int) -> int:
    """Parameters of a GPT-2-like model with biases and without a position table: h v + L (12 h^2 + 13 h) + 2 h.

    Chapter First Steps, "Weights/grads/optimizer states memory".
    """
    return h * v + layers * (12 * h * h + 13 * h) + 2 * h


@dataclass(frozen=True)
class Precision:
    """Bytes of one parameter, by what is kept of it."""

    master: int
    accumulation: int
    """Of the sum of gradients over micro-batches."""
    weights: int
    gradients: int
    moments: int
    """Both of Adam's together."""

    @property
    def total(self) -> int:
        """Bytes of one parameter."""
        return self.master + self.accumulation + self.weights + self.gradients + self.moments


PRECISIONS = {
    "fp32": Precision(0, 0, 4, 4, 8),
    "bf16": Precision(4, 0, 2, 2, 8),
    "bf16 with fp32 accumulation": Precision(4, 4, 2, 2, 8),
    "transformer engine": Precision(0, 0, 4, 4, 8),
    "fp8-lm o3": Precision(2, 2, 1, 1, 3),
    "deepseek-v3": Precision(4, 4, 1, 2, 4),
    "nanotron fp8": Precision(2, 4, 1, 1, 2),
}
"""Chapters First Steps and FP8 pretraining (its table)."""

OPTIMIZER = 12
"""k: bytes of master weight and moments, which ZeRO shards; chapter ZeRO."""


def zero_bytes(
    params: float, stage: int, dp: int, *, k: int = OPTIMIZER, accumulate: bool = False
) -> float:
    """Weights, gradients and optimizer state on one GPU with ZeRO `stage` over `dp` GPUs; chapter ZeRO.

    `accumulate` adds float32 sums of gradients. The playbook's plots have k = 8 (erratum `optimizer 8`).
    """
    require(stage in (0, 1, 2, 3), "zero", stage, "choose 0, 1, 2 or 3")
    weights = 2 * params / (dp if stage == 3 else 1)
    gradients = (6 if accumulate else 2) * params / (dp if stage >= 2 else 1)
    return weights + gradients + k * params / (dp if stage >= 1 else 1)


def activations(
    layers: int,
    h: int,
    heads: int,
    s: int,
    *,
    b: int = 1,
    recompute: Recompute = "none",
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Activations of the layers of one micro-batch; chapters First Steps, Tensor, Sequence and Context Parallelism.

    none: L s b h (34 + 5 a s / h) (arXiv 2205.05198, equation 1); with tensor parallelism (10 + 24/t + 5 a s / (h t))
    (equation 2), with sequence parallelism all of it by t. selective: without the scores. full: the layers' inputs in
    bfloat16, and the figure's dropout mask of the first (erratum `dropout`).
    """
    one = layers * s * b * h / cp
    shared = tp if sequence_parallel else 1
    if recompute == "full":
        return (2 * one + s * b * h / cp) / shared
    scores = 5 * heads * s / h if recompute == "none" else 0.0
    return one * (10 / shared + (24 + scores) / tp)


def predict_memory(params: float, acts: float, *, dp: int = 1) -> list[tuple[str, float]]:
    """The bars of the playbook's `predict_memory` tool, recomputed from its screenshot: nanotron with ZeRO-1 over `dp`.

    bfloat16 weights 2N; float32 weights and sums of gradients 4N each; moments 8N from the first optimizer step on.
    """
    static = 2 * params
    accumulators = static + 4 * params / dp + 4 * params
    stepped = accumulators + 8 * params / dp
    return [
        ("model init", static),
        ("gradient accumulator init", accumulators),
        ("forward-backward peak", accumulators + acts),
        ("optimizer step", stepped),
        ("second forward-backward peak", stepped + acts),
        ("second optimizer step", stepped),
    ]


@dataclass(frozen=True, kw_only=True)
class Widget:
    """The memory widget of chapter First Steps, as its script computes it (`main.bundle.js`), errors included."""

    layers: int
    h: int
    h_ff: int
    heads: int
    v: int
    s: int
    b: int = 1
    mixed: bool = True
    recompute: Recompute = "none"
    feed_forward: Literal["relu", "gelu", "swiglu"] = "gelu"
    tp: int = 1
    sequence_parallel: bool = False
    dp: int = 1
    zero: int = 0
    k: int = 8
    """Bytes of the optimizer's own state of one parameter."""

    @property
    def width(self) -> int:
        """Bytes of one activation (the widget's B)."""
        return 2 if self.mixed else 4

    @property
    def params(self) -> int:
        """h (v + s) + L (12 h^2 + 13 h) + 2 h: errata `widget size` and `widget tensor parallel`."""
        return num_params(self.layers, self.h, self.v) + self.h * self.s

    @property
    def activations(self) -> float:
        """Layers and head; full recomputation keeps the layers' inputs, whole on every GPU."""
        B, t, sbh = self.width, self.tp, self.s * self.b * self.h
        u = t if self.sequence_parallel else 1
        scores = (2 * B + 1) * self.heads * self.s**2 * self.b
        if self.recompute == "selective":
            scores = 0
        attention = sbh / t * (5 * B + 1) + scores
        if not self.sequence_parallel:
            attention = sbh * (4 * B / t + B + 1) + scores / t
        wide = {"relu": 1, "gelu": 2, "swiglu": 4}[self.feed_forward]
        ffn = (sbh * B + sbh) / u + wide * self.s * self.b * self.h_ff * B / t
        layer = sbh * B if self.recompute == "full" else attention + ffn + 2 * sbh * B / u
        logits = 4 * self.s * self.b * self.v / u
        return self.layers * layer + (sbh + 2 * sbh * B) / u + logits

    @property
    def parts(self) -> dict[str, float]:
        """Bytes on one GPU; gradients in the width of the activations (erratum `widget accumulation`)."""
        n, dp = self.params, self.dp
        return {
            "parameters": self.width * n / (dp if self.zero == 3 else 1),
            "gradients": self.width * n / (dp if self.zero >= 2 else 1),
            "optimizer": (self.k + (4 if self.mixed else 0)) * n / (dp if self.zero >= 1 else 1),
            "activations": self.activations,
        }


def bubble(schedule: str, p: int, m: int, v: int = 1) -> float:
    """Idle over ideal time of a pipeline of p stages and m micro-batches; chapter Pipeline Parallelism.

    naive: p - 1, one micro-batch at a time; afab and 1f1b: (p - 1) / m; interleaved, v stages a rank: (p - 1) / (v m).
    """
    rounds = {"naive": 1, "afab": m, "1f1b": m, "interleaved": v * m}
    require(schedule in rounds, "schedule", schedule, f"choose one of {', '.join(rounds)}")
    return (p - 1) / rounds[schedule]


def block_params(h: int) -> int:
    """Parameters of a layer with h_ff = 4 h and a gate: 16 h^2; appendix A2."""
    return 16 * h * h


def flops(params: float, layers: int, h: int, s: int) -> float:
    """FLOPs of forward and backward pass of one sequence: 6 s N + 12 L h s^2, attention not causal; appendix A2."""
    return 6 * s * params + 12 * layers * h * s * s


# Communication over computation, appendix A3 and the cheat-sheet. Below 1 the communication can hide. `balance` is the
# GPU's FLOP/s over the link's bytes a second: 19,790 FLOPs a byte for an H100 with 400 Gb/s, 2,199 over NVLink. All in
# bfloat16, two bytes a value (erratum `bytes`).


def data_parallel_ratio(balance: float, tokens: float, dp: int) -> float:
    """All-reduce of the gradients, 4N (dp-1)/dp bytes, beside the backward pass, 4 N tokens FLOPs.

    N cancels (erratum `num_params`); `tokens` are those of a micro-batch on one GPU. ZeRO-1 moves the same.
    """
    return balance / tokens * (dp - 1) / dp


def zero3_ratio(balance: float, tokens: float, dp: int) -> float:
    """All-gather of the next layer, 2P (dp-1)/dp bytes, beside the forward pass of this one, 2 P tokens FLOPs."""
    return balance / tokens * (dp - 1) / dp


def tensor_parallel_ratio(balance: float, width: float, tp: int) -> float:
    """All-gather (or reduce-scatter) of tokens x h in bfloat16 beside a product of h x `width` split over `tp`.

    width h: (tp-1)/h flops/bw, where the playbook prints (tp-1)/(2h) (erratum `bytes`); gate and up together are 8h.
    """
    return balance * (tp - 1) / width


def pipeline_ratio(balance: float, h: int, layers: int) -> float:
    """Sending tokens x h in bfloat16 to the next stage beside the forward pass of its `layers` of 16 h^2 parameters."""
    return balance / (16 * h * layers)


def context_parallel_ratio(
    balance: float, tokens: float, h: int, kv_width: int, *, causal: bool = True
) -> float:
    """One step of the ring: keys and values of the neighbour's `tokens` beside the scores with them.

    Bytes 4 `tokens` kv_width; FLOPs 4 tokens^2 h, half with a causal mask in zig-zag order. The steps cancel.
    """
    return balance * kv_width / (tokens * h) * (2 if causal else 1)


def expert_parallel_ratio(balance: float, h_ff: int, ep: int, *, matrices: int = 3) -> float:
    """All-to-all of every token's copies, there and back, beside their experts of width h_ff.

    4 h (ep-1)/ep bytes and 2 `matrices` h h_ff FLOPs a copy: h and the number of experts cancel (erratum `experts`).
    """
    return balance * 2 * (ep - 1) / ep / (matrices * h_ff)
