"""What one layer keeps for its backward pass, what that pass has in hand, and the loss: bytes on one GPU.

The lists were read off XLA's buffer assignment of our step, tensor by tensor (`docs/planning/memory_xla.csv` has the
runs). In the comments, letters are those of `sharding.py`; `a` is the width of one activation in bytes.
"""

import math
from dataclasses import dataclass

from ultrascale_jax.config import TrainConfig
from ultrascale_jax.plan import context
from ultrascale_jax.plan.workload import Run

CHUNK_BYTES = 2**29
"""`models/loss.py`: the float32 logits of one chunk, at most."""


@dataclass(frozen=True)
class Layer:
    """Numbers of values in the tensors of one layer on one GPU."""

    whole: float
    """Tokens times D where the tensor group has every token: the input of its matmuls."""
    residual: float
    """Tokens times D of the residual stream, which `sp` splits."""
    query: float
    """Queries, or attention's result."""
    key: float
    """Keys, or values; a tensor group larger than the kv heads shares them."""
    ffn: float
    """Gate, or up, or their product."""
    scores: float
    """Attention scores of a block, where they are in memory; 0 with flash attention."""
    statistics: float
    """Flash attention's log-sum-exp, or a ring's; 0 without."""
    width: int
    """Bytes of one activation."""
    input_width: int
    """Bytes of one that is kept only as the input of a matmul: 1 with fp8."""


def layer_of(run: Run) -> Layer:
    """The layer of `run`; without experts."""
    shape, mesh, tokens = run.shape, run.mesh, run.tokens
    heads, head_dim = shape.num_heads / mesh.tensor, shape.head_dim
    # As kernels/attention.py decides.
    flash = (
        run.precision != "fp32"
        and head_dim % 8 == 0
        and head_dim <= 256
        and shape.attention != "xla"
    )
    width = 4 if run.precision == "fp32" else 2
    return Layer(
        whole=tokens * shape.d_model,
        residual=tokens * shape.d_model / mesh.sp,
        query=tokens * heads * head_dim,
        key=tokens * head_dim * shape.num_kv_heads / min(mesh.tensor, shape.num_kv_heads),
        ffn=tokens * shape.d_ff / mesh.tensor,
        scores=0 if flash else tokens * run.seq_len / run.ring[0] * heads,
        statistics=tokens * heads if flash or mesh.cp > 1 else 0,
        width=width,
        input_width=1 if run.precision == "fp8" else width,
    )


def kept(run: Run, layer: Layer) -> dict[str, float]:
    """Bytes that a mean layer keeps from its forward to its backward pass, by kind."""
    shape, parts = run.shape, dense_kept(run, layer)
    if shape.moe_layers:
        moe = shape.moe_layers / shape.num_layers
        parts["mlp"] = parts.get("mlp", 0) * (1 - moe)
        for name, value in experts_kept(run, layer).items():
            parts[name] = parts.get(name, 0) + moe * value
    return parts


def document_mask(run: Run, layer: Layer) -> float:
    """Bytes of the masks that cuDNN's attention reads where documents end inside a sequence.

    On a ring that of the own block, and of the blocks of the first step, which the backward pass uses again.
    """
    if layer.scores or not run.document_mask:
        return 0
    others = context.block_share(run) if run.ring[0] > 1 else 0
    return 2 * run.sequences * (run.seq_len / run.ring[0]) ** 2 * (1 + others)


def dense_kept(run: Run, layer: Layer) -> dict[str, float]:
    """Bytes that one dense layer keeps from its forward to its backward pass, by kind.

    full: its input. selective: the named tensors of `training/remat.py`, and cuDNN's residuals, so attention's result
    is there twice, of a ring once. none: also gate and up through silu and product, and each norm's float32 insides (3
    arrays); the norms' results then are kept gathered over sp. `mlp_out` is never kept: the next layer's input is.
    """
    a, i = layer.width, layer.input_width
    residual, query, key = layer.residual, layer.query, layer.key
    flash = a * query + 4 * layer.statistics if layer.statistics else 0
    core = i * query if run.mesh.cp == 1 else 0
    mlp = a * layer.ffn * (2 if run.shape.gated else 1)
    parts = {"layer inputs": a * residual}
    if run.remat == "full":
        return parts
    if run.remat == "selective":
        parts["attention"] = a * (query + 2 * key + residual) + core + flash
        parts["mlp"] = mlp
        parts["norms"] = 2 * i * residual
    elif run.remat == "dots":
        parts["attention"] = a * (query + 2 * key + residual)
        parts["mlp"] = mlp
    elif run.remat == "none":
        qk_norms = 12 * (query + key) if run.shape.qk_norm != "none" else 0
        scores = (4 + a) * layer.scores if run.mesh.cp == 1 else 0
        parts["layer inputs"] = 0
        parts["attention"] = a * (query + 2 * key) + core + flash + qk_norms + scores
        parts["mlp"] = 3 * mlp
        parts["norms"] = 24 * residual + 2 * i * layer.whole
    else:
        saved = TrainConfig(remat=run.remat).remat_names()[0]
        sizes = {"q": query, "k": key, "v": key, "attn_core": query, "attn_out": residual}
        parts["attention"] = a * sum(sizes.get(name, 0) for name in saved)
        parts["mlp"] = a * layer.ffn * sum(name in ("gate", "up") for name in saved)
        parts["norms"] = a * residual * sum(name in ("attn_norm", "mlp_norm") for name in saved)
    return parts


def experts_kept(run: Run, layer: Layer) -> dict[str, float]:
    """Bytes that a layer of experts keeps instead of the feed-forward layer, by kind; theory, the trainer has none yet.

    Every token travels to its experts and back: two arrays of tokens x experts_per_token x D; the router's float32
    probabilities stay for its gradient. Balanced routing, no padding.
    """
    shape, a = run.shape, layer.width
    if run.remat == "full":
        return {}
    sent = layer.residual * shape.experts_per_token
    return {
        "mlp": a * expert_ffn(run) * (2 if shape.gated else 1) * (3 if run.remat == "none" else 1),
        "dispatch": (layer.input_width + a) * sent + 4 * run.tokens * shape.num_experts,
    }


def expert_ffn(run: Run) -> float:
    """Values of the experts' gate on one GPU: as many rows as its own tokens send, and the shared experts'."""
    shape = run.shape
    rows = run.tokens * (shape.experts_per_token + shape.shared_experts)
    return rows * shape.expert_width / run.mesh.tensor


def working_set(run: Run, layer: Layer) -> float:
    """Bytes of activations that the backward pass of one layer has in hand at its largest moment.

    In the feed-forward layer: the product and two gradients, and what is recomputed of gate and up; or in attention the
    scores where they are in memory, value and gradient in float32 and in the type of compute; or a ring's blocks.
    """
    a, shape = layer.width, run.shape
    wide = {"none": 2, "selective": 3, "dots": 3}.get(run.remat, 4)
    ffn = expert_ffn(run) if shape.moe_layers else layer.ffn
    mlp = a * ffn * (wide if shape.gated else wide - 1) + context.left(run, a)
    attention = max(2 * (4 + a) * layer.scores, context.backward_bytes(run, a))
    gathered = 2 if run.mesh.sp > 1 else 0
    return max(mlp, attention) + a * (
        (2 + gathered) * layer.whole + 2 * layer.residual + 2 * layer.query
    )


def loss_chunks(run: Run) -> tuple[int, float]:
    """Chunks into which `models/loss.py` cuts a device's sequence, and the bytes of one chunk's float32 logits."""
    length = run.seq_len // run.mesh.cp
    parts = run.mesh.tensor * run.mesh.pp
    total = 4 * run.sequences * length * (run.shape.vocab_size // parts)
    least = max(1, math.ceil(total / CHUNK_BYTES))
    chunks = next((n for n in range(least, length) if length % n == 0), length)
    return chunks, total / chunks
