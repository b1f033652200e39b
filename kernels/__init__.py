"""GPU kernels that can be used alone, each with its XLA reference: call them on local arrays, under `jax.shard_map`."""

# From the root of a checkout the name may mean Hugging Face's package.
if __name__ == "kernels":
    raise ImportError("this folder is ultrascale_jax.kernels; import kernels from elsewhere")

# Functions have the names of their modules: they are imported here, so that the names mean the functions.
from ultrascale_jax.kernels.attention import attention as attention
from ultrascale_jax.kernels.attention import attention_backward as attention_backward
from ultrascale_jax.kernels.attention import attention_forward as attention_forward
from ultrascale_jax.kernels.fp8_matmul import fp8_matmul as fp8_matmul
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul as grouped_matmul
from ultrascale_jax.kernels.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from ultrascale_jax.kernels.quantize_fp8 import Quantized as Quantized
from ultrascale_jax.kernels.quantize_fp8 import dequantize as dequantize
from ultrascale_jax.kernels.quantize_fp8 import quantize_fp8 as quantize_fp8
from ultrascale_jax.kernels.quantize_fp8 import quantize_fp8_both as quantize_fp8_both
from ultrascale_jax.kernels.quantize_fp8 import rms_norm_quantize as rms_norm_quantize
from ultrascale_jax.kernels.quantize_fp8 import swiglu_quantize as swiglu_quantize
from ultrascale_jax.kernels.rms_norm import add_rms_norm as add_rms_norm
from ultrascale_jax.kernels.rms_norm import rms_norm as rms_norm
