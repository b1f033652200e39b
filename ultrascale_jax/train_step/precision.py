"""Set the dtype of each number: the one place with the precision policy.

float32: master parameters, optimizer state, gradient accumulators, norms, softmax, loss. Compute dtype: matmuls, the
residual stream, communication. Fp8, on request: products of a block's matrices, and their residuals; attention, the
router, the embedding and the head stay in the compute dtype.
"""

import jax
import jax.numpy as jnp

from ultrascale_jax.config import FP8, Config, policies, require
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.choices import AttentionCall, is_blackwell, is_hopper
from ultrascale_jax.models.fp8 import Fp8, Recipe, Scaling, weight_amaxes
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.transformer import Transformer

COMPUTE = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
COMPUTE |= dict.fromkeys(FP8, jnp.bfloat16)
"""Compute dtype for each `train.precision`."""

SCALINGS: dict[str, Scaling] = {
    "fp8": "tensor",
    "fp8_rowwise": "row",
    "fp8_block": "block",
    "mxfp8": "mx",
}
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
    return Fp8(how, weight_amaxes(params.stacks, params.orders, cfg.model.num_layers))


def layer_inputs(cfg: Config, batch: dict[str, jax.Array], fp8: Fp8 | None) -> LayerInputs:
    """Return the inputs that the layers read of a micro-batch; `fp8` is that of `fp8_of`."""
    return LayerInputs.of(
        cfg.model,
        batch["positions"],
        batch.get("segment_ids"),
        dtype=COMPUTE[cfg.train.precision],
        window=cfg.model.sliding_window,
        context=cfg.cp,
        recompute=policies(cfg.train.remat)[-1] == "selective",
        moe=cfg.moe,
        lowering=Lowering.of(cfg),
        fp8=fp8,
    )


def check_kernels(cfg: Config, device: jax.Device) -> None:
    """Refuse programs that do not run on this device or in this precision."""
    kind, precision = device.device_kind, cfg.train.precision
    fix = f"needs a Blackwell GPU, B200 or later, and this is a {kind}; use fp8 or fp8_rowwise"
    is_able = device.platform != "gpu" or is_blackwell(kind)
    require(precision != "mxfp8" or is_able, "train.precision", precision, fix)
    for name, value in cfg.kernels.choices.items():
        if name == "kernels.fp8_matmul" and precision != "fp8_block":
            continue
        fix = f"needs a GPU, and this is a {device.platform}; use auto or xla"
        require(device.platform == "gpu" or value in ("auto", "xla"), name, value, fix)
        fix = f"needs an H100 or H200, and this is a {kind}; use auto or xla"
        require(is_hopper(kind) or value != "mosaic", name, value, fix)
        fix = f"computes in bfloat16, and train.precision is {precision}; use auto or xla"
        require(precision not in ("fp16", "fp32") or value != "mosaic", name, value, fix)
    attention = cfg.kernels.attention
    for layer in range(cfg.model.layer_group):
        call = attention_call(cfg, kind, on_gpu=device.platform == "gpu", layer=layer)
        lacking = call.lacking(attention)
        fix = f"needs {', '.join(lacking)}, and has {call}; use auto"
        require(not lacking, "kernels.attention", attention, fix)


def attention_call(cfg: Config, kind: str, *, on_gpu: bool = True, layer: int = 0) -> AttentionCall:
    """Return the facts about the attention of a layer, one of the first row, on GPUs of `kind`, JAX's name."""
    window = cfg.model.sliding_window
    (ring, _), length = cfg.cp.ranks(cfg.mesh.cp), cfg.data.seq_len
    return AttentionCall(
        kind=kind,
        on_gpu=on_gpu,
        dtype=jnp.dtype(COMPUTE[cfg.train.precision]).name,
        queries=length // ring,
        keys=length // ring,
        head_dim=cfg.model.of_layer(layer).head_dim,
        masked=cfg.data.document_mask,
        window=window is not None and (cfg.model.layer_group == 1 or not cfg.model.is_full(layer)),
    )
