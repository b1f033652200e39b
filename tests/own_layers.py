"""A model whose attention, MLP, norm and loss are not the built-in ones, as `docs/layers.md` shows them.

Its loss and the parts of its layers have terms, with a weight in the objective and without.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import ultrascale_jax as us
from tests.runs import change

CFG = us.Config(
    model=us.ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8
    ),
    data=us.DataConfig(source="synthetic", seq_len=32),
    train=us.TrainConfig(steps=2, global_batch=8, precision="bf16", eval_batches=1),
)


def on(cfg: us.Config, mesh: str) -> us.Config:
    """Return the checked configuration on a mesh, as `fsdp=2,sp=2`."""
    cfg = change(cfg, mesh=us.MeshConfig.parse(mesh).sizes)
    return cfg.check(math.prod(cfg.mesh.sizes.values()))


class GatedAttention(nnx.Module):
    """Attention with a gate for each head."""

    def __init__(self, cfg: us.ModelConfig, key: jax.Array, kernels: us.KernelsConfig):
        self.implementation = kernels.attention
        D, N, K, H = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        k_q, k_k, k_v, k_gate, k_o = jax.random.split(key, 5)
        self.w_q = us.param(k_q, "DNH", "BTD", (D, N, H))
        self.w_k = us.param(k_k, "DKH", "BTD", (D, K, H))
        self.w_v = us.param(k_v, "DKH", "BTD", (D, K, H))
        self.w_gate = us.param(k_gate, "DN", "BTD", (D, N))
        self.w_o = us.param(k_o, "NHD", "BTNH", (N, H, D))

    def __call__(self, x_BRD, inputs: us.LayerInputs):
        x_BTD = us.gather_sequence(x_BRD)
        q_BTNH = us.rotate(us.linear("BTD,DNH->BTNH", x_BTD, self.w_q[...]), inputs.rope)
        k_BTKH = us.rotate(us.linear("BTD,DKH->BTKH", x_BTD, self.w_k[...]), inputs.rope)
        v_BTKH = us.linear("BTD,DKH->BTKH", x_BTD, self.w_v[...])
        out_BTNH, cache = us.attend(self.implementation, q_BTNH, k_BTKH, v_BTKH, inputs)
        gate_BTN = jax.nn.sigmoid(us.linear("BTD,DN->BTN", x_BTD, self.w_gate[...]))
        out_BTNH = out_BTNH * gate_BTN[..., None]
        y_BTD = us.linear("BTNH,NHD->BTD", out_BTNH, self.w_o[...], partial=True)
        return y_BTD, cache, {"open_gates": jnp.mean(gate_BTN.astype(jnp.float32))}


class SquaredReLU(nnx.Module):
    """Two matrices with a squared ReLU between them, and a scale for each channel."""

    def __init__(self, cfg: us.ModelConfig, key: jax.Array):
        k_up, k_down = jax.random.split(key)
        D, F = cfg.d_model, 2 * cfg.d_ff
        self.w_up = us.param(k_up, "DF", "BTD", (D, F))
        self.scale = us.param(None, "F", "BTF", (F,), std=1)
        self.w_down = us.param(k_down, "FD", "BTF", (F, D))

    def __call__(self, x_BRD):
        up_BTF = us.linear("BTD,DF->BTF", us.gather_sequence(x_BRD), self.w_up[...])
        scale_BTF = us.broadcast_param(self.scale[...], "F", "BTF", up_BTF.shape)
        h_BTF = jnp.square(jax.nn.relu(up_BTF)) * scale_BTF.astype(up_BTF.dtype)
        y_BRD = us.linear("BTF,FD->BTD", h_BTF, self.w_down[...], to="BRD")
        h32_BTF = h_BTF.astype(jnp.float32)
        terms = {
            "activity": jnp.mean(jnp.abs(h32_BTF)),
            "zeros": jnp.mean(jnp.float32(h32_BTF == 0)),
        }
        return y_BRD, terms


class Unscaled(nnx.Module):
    """RMSNorm without a scale: a norm that has no parameters."""

    def __init__(self, cfg: us.ModelConfig):
        self.eps = cfg.norm_eps

    def __call__(self, x_BRD):
        x32 = x_BRD.astype(jnp.float32)
        square = us.mean(jnp.square(x32), "D", "BRD")
        return (x32 * jax.lax.rsqrt(square + self.eps)).astype(x_BRD.dtype)


class OwnModel(us.Transformer):
    """The layers above, and a head that maps hidden states once more and keeps them small."""

    layers = us.Layers(attention=GatedAttention, mlp=SquaredReLU, norm=Unscaled)
    layer_terms: ClassVar = {"activity": 0.5, "open_gates": 2.0, "zeros": 0}
    loss_terms = ("squares",)

    def __init__(self, cfg: us.ModelConfig, key: jax.Array, *place, **settings):
        super().__init__(cfg, key, *place, **settings)
        k_up, k_down = jax.random.split(jax.random.fold_in(key, 1))
        D, F = cfg.d_model, cfg.d_ff
        self.w_up = us.param(k_up, "DF", "BTD", (D, F))
        self.w_down = us.param(k_down, "FD", "BTF", (F, D))

    def normed(self, x_BRD):
        x_BRD = super().normed(x_BRD)
        w_up, w_down = self.gathered((self.w_up, self.w_down), x_BRD.dtype)
        up_BTF = us.linear("BTD,DF->BTF", us.gather_sequence(x_BRD), w_up[...])
        return x_BRD + us.linear("BTF,FD->BTD", jax.nn.gelu(up_BTF), w_down[...], to="BRD")

    def loss(self, x_BRD, targets_BT, weight, **settings):
        objective, nats = super().loss(x_BRD, targets_BT, weight, **settings)
        squares = jnp.sum(jnp.square(us.reshard("BRD->BTD", x_BRD).astype(jnp.float32)))
        # All members of the tensor group (and of a pipeline) have computed the same sum.
        squares = weight * us.all_reduce(squares, "V", "mean")
        return objective + 1e-3 * squares, nats, {"squares": squares}
