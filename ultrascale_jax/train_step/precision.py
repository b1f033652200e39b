"""Set the dtype of each number: the one place with the precision policy.

float32: master parameters, optimizer state, gradient accumulators, norms, softmax, loss. Compute dtype: matmuls, the
residual stream, communication. Fp8, on request: products of a block's matrices, and their residuals; attention, the
router, the embedding and the head stay in the compute dtype.
"""

import jax
import jax.numpy as jnp

from ultrascale_jax.config import FP8, Config, require
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.device import is_hopper
from ultrascale_jax.kernels.document_classes import LEAST_TOKENS, SHORTEST, divides
from ultrascale_jax.kernels.limits import cudnn_takes_head_dim
from ultrascale_jax.models.fp8 import Fp8, Recipe, Scaling, weight_amaxes
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.transformer import Transformer

COMPUTE = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
COMPUTE |= dict.fromkeys(FP8, jnp.bfloat16)
"""Compute dtype for each `train.precision`."""

SCALINGS: dict[str, Scaling] = {"fp8": "tensor", "fp8_rowwise": "row", "fp8_block": "block"}
"""The part of an array that has one fp8 scale, for each `train.precision`."""


def recipe(cfg: Config) -> Recipe | None:
    """Return the fp8 recipe of this run's products; None without fp8."""
    if cfg.train.precision not in FP8:
        return None
    scaling, fp8 = SCALINGS[cfg.train.precision], cfg.fp8
    return Recipe(
        scaling=scaling,
        gradients="e5m2" if scaling == "tensor" else "e4m3",
        wgrad=fp8.wgrad,
        implementation=cfg.kernels.fp8_matmul,
        bf16_first=fp8.bf16_first,
        bf16_last=fp8.bf16_last,
    )


def fp8_of(cfg: Config, params: Transformer) -> Fp8 | None:
    """Return the recipe and the matrices' scales of fp8, once a step, from the stored parameters."""
    how = recipe(cfg)
    if how is None:
        return None
    if how.scaling != "tensor":
        return Fp8(how, {})
    return Fp8(how, weight_amaxes(params.blocks, params.layer_order_of, cfg.model.num_layers))


def layer_inputs(cfg: Config, batch: dict[str, jax.Array], fp8: Fp8 | None) -> LayerInputs:
    """Return the inputs that the layers read of a micro-batch; `fp8` is that of `fp8_of`."""
    return LayerInputs.of(
        cfg.model,
        batch["positions"],
        batch.get("segment_ids"),
        dtype=COMPUTE[cfg.train.precision],
        window=cfg.model.sliding_window,
        context=cfg.cp,
        recompute=cfg.train.remat == "selective",
        moe=cfg.moe,
        lowering=Lowering.of(cfg),
        fp8=fp8,
    )


def check_kernels(cfg: Config, device: jax.Device) -> None:
    """Refuse programs that do not run on this device or in this precision."""
    kind = device.device_kind
    for name, value in cfg.kernels.choices.items():
        if name == "kernels.fp8_matmul" and cfg.train.precision != "fp8_block":
            continue
        fix = f"needs a GPU, and this is a {device.platform}; use auto or xla"
        require(device.platform == "gpu" or value in ("auto", "xla"), name, value, fix)
        fix = f"needs an H100 or H200, and this is a {kind}; use auto or xla"
        require(is_hopper(kind) or value != "mosaic", name, value, fix)
        fix = f"computes in bfloat16, and train.precision is {cfg.train.precision}; use auto or xla"
        require(cfg.train.precision not in ("fp16", "fp32") or value != "mosaic", name, value, fix)
    attention, length, width = cfg.kernels.attention, cfg.data.seq_len, cfg.model.head_dim
    packs = divides(length) and cudnn_takes_head_dim(width)
    fix = (
        f"needs a data.seq_len of {LEAST_TOKENS} or more that 4 divides down to {SHORTEST} (it is {length}) and a "
        f"model.head_dim that 8 divides, up to 256 (it is {width}); use auto"
    )
    require(attention != "cudnn_packed" or packs, "kernels.attention", attention, fix)
