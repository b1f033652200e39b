"""Count the model FLOPs of a token from its shapes, and compare them with the peak of a device.

Counted is the arithmetic that the model needs, not what a machine happens to do: a product of a vector with an [m, n]
matrix is 2*m*n, its backward pass twice that, recomputation is free, and causal attention counts as the half of the
score matrix that is used. Borders between packed documents are ignored unless `plan` gets their length. Model FLOPs
utilisation (MFU) is this count per second over the chip's peak (PaLM, arXiv 2204.02311, appendix B, with causal
attention halved); the peak is that of `train.precision`, so a run in fp8 is held against twice the peak of one in
bfloat16.
"""

import re
from typing import NamedTuple

from ultrascale_jax.config import FP8, ModelConfig, require
from ultrascale_jax.plan.model_shape import ModelShape


class Peaks(NamedTuple):
    """Dense peaks of a device in TFLOP/s."""

    bf16: float
    tf32: float
    fp8: float | None
    """None without tensor cores for it."""

    def of(self, precision: str, device: str) -> float:
        """Return the peak at `train.precision`, fp32 on tensor cores; a `UserError` about `device` if it has none."""
        peaks = {"fp32": self.tf32, "bf16": self.bf16, "fp16": self.bf16}
        peak = (peaks | dict.fromkeys(FP8, self.fp8))[precision]
        fix = f"{device} has no such tensor cores; use bf16"
        require(peak is not None, "precision", precision, fix)
        assert peak is not None  # `require` raises
        return peak


PEAK_TFLOPS = (
    (r"A100", Peaks(312.0, 156.0, None)),
    (r"A40$", Peaks(149.7, 74.8, None)),
    (r"H100 PCIe", Peaks(756.5, 378.0, 1513.0)),
    (r"H100 NVL", Peaks(835.5, 417.5, 1670.5)),
    (r"H100", Peaks(989.4, 494.7, 1978.9)),
    (r"H200 NVL", Peaks(835.5, 417.5, 1670.5)),
    (r"G?H200", Peaks(989.4, 494.7, 1978.9)),
    (r"H800$", Peaks(989.4, 494.7, 1978.9)),
    (r"H20$", Peaks(148.0, 74.0, 296.0)),
    (r"GB[23]00", Peaks(2500.0, 1250.0, 5000.0)),
    (r"B[23]00", Peaks(2250.0, 1125.0, 4500.0)),
    (r"L40S", Peaks(362.05, 183.0, 733.0)),
    (r"L4$", Peaks(121.0, 60.0, 242.5)),
    (r"RTX 4090$", Peaks(165.2, 82.6, 330.3)),
)
"""(pattern of the device kind, its peaks); the first match wins.

Sources: NVIDIA's data sheets of A100, A40, H100, H200, GH200, H20, HGX B200 and B300, GB200 and GB300 NVL72, L40S and
L4, halved where they print the rate with sparsity; H800: DeepSeek-V3 (arXiv 2412.19437), whose GPUs compute as an H100
does; the Ada whitepaper, appendix A, for the RTX 4090 (bfloat16 and fp8 with float32 accumulation).
"""


def mean_keys(seq_len: int, window: int | None) -> float:
    """Return how many keys a position sees on average under a causal mask: T/2, or less within a sliding window."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)


def attention_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Count the FLOPs per token of the scores and of their product with the values, forward and backward.

    Per layer and key seen 6*N*(H + W), W the width of values: 12*N*H but for latent attention. Linear attention reads,
    corrects and reads a state of N*H*W numbers, 18 FLOPs each; Mamba-2 does not read first, 12.
    """
    shape = ModelShape.of(model)
    if len(shape.kinds) > 1:
        parts = [
            (attention_flops_per_token(one, seq_len), count / shape.layers)
            for one, count in shape.kinds
        ]
        return sum(flops * share for flops, share in parts)
    windowed = model.window_share
    keys = (1 - windowed) * mean_keys(seq_len, None)
    keys += windowed * mean_keys(seq_len, model.sliding_window)
    keys *= shape.full_layers - model.mtp_layers
    keys += model.mtp_layers * mean_keys(seq_len, model.window(model.num_layers - 1))
    states = 0
    if model.linear is not None:
        states = model.linear.value_heads * model.linear.key_dim * model.linear.value_dim
        states *= 18 if model.linear.rule == "delta" else 12
    scores = 6 * model.num_heads * (model.head_dim + model.value_dim) * keys
    return scores + shape.linear_layers * states


def flops_per_token(
    model: ModelConfig, seq_len: int, adapters: int = 0, *, reference: ModelConfig | None = None
) -> float:
    """Count the FLOPs of forward and backward pass per token: 6 a matrix parameter it meets, and the attention's.

    A token meets all dense matrices of the layers, the routed experts that it visits, and the head once for itself and
    once for each of `mtp_layers`, but not the embedding: `ModelShape.active_params`.
    With so many parameters of `adapters` the model's own are frozen: 4 each, as they have no gradients. The model
    `reference` of `train.dpo` or `train.distill` runs its forward pass too.
    """
    attention = attention_flops_per_token(model, seq_len)
    active = ModelShape.of(model).active_params
    matrices = 4 * active + 6 * adapters if adapters else 6 * active
    forward = 0.0 if reference is None else flops_per_token(reference, seq_len) / 3
    return matrices + attention + forward


def find_peaks(device_kind: str) -> Peaks | None:
    """Return the dense peaks of a device by JAX's name for it; none: not known."""
    return next((peaks for pattern, peaks in PEAK_TFLOPS if re.search(pattern, device_kind)), None)


def peak_tflops(device_kind: str, precision: str) -> float | None:
    """Return the dense peak of one device in TFLOP/s at `train.precision`, fp32 on tensor cores; none: not known.

    Raises `UserError` if the device is known to have no tensor cores for `precision`.
    """
    peaks = find_peaks(device_kind)
    return None if peaks is None else peaks.of(precision, device_kind)


def mfu(flops_per_s: float, device_kind: str, precision: str) -> float | None:
    """Divide the model FLOPs that one device does in a second by its dense peak; None if that is not known.

    Raises `UserError` as `peak_tflops` does.
    """
    peak = peak_tflops(device_kind, precision)
    return None if peak is None else flops_per_s / (peak * 1e12)
