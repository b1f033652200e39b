"""Bytes of activations on one GPU: kept for the backward pass, in use during it, and of the loss.

The lists were read off XLA's buffer assignment of our step, tensor by tensor (`docs/planning/memory_xla.csv` has the
runs). The comments use the letters of `sharding.py`; `a` is the width of one activation in bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ultrascale_jax.config import Keep, padded_vocab_size, remat_names
from ultrascale_jax.config.remat import keeps
from ultrascale_jax.kernels.document_classes import class_segments
from ultrascale_jax.models.loss_chunks import CAPPED, DISTILLED, num_chunks
from ultrascale_jax.plan.formulas import context, experts, linear_attention
from ultrascale_jax.plan.workload import Run, of_layer, of_tokens


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


@of_tokens
def layer_of(run: Run) -> Layer:
    """Return the layer of `run`; without experts."""
    shape, mesh, tokens = run.shape, run.mesh, run.tokens
    heads, head_dim = shape.num_heads / mesh.tensor, shape.head_dim
    flash = run.kernels.attention != "xla" and not run.attention.lacking("cudnn")
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


@of_layer
def saved_bytes(run: Run) -> dict[str, float]:
    """Count the bytes that a mean layer keeps from its forward to its backward pass, by kind.

    Where a pipeline's layers are of both kinds, each has room for the tensors of routed experts; the branch for a
    dense layer or shared experts keeps nothing (`parallel/pipeline/rows.py: either`).
    """
    if len(run.kinds) > 1:
        return mean([(saved_bytes(one), share) for one, share in run.kinds])
    layer, moe = layer_of(run), run.shape.expert_share
    parts = dense_saved_bytes(run, layer)
    if moe:
        parts["mlp"] = 0 if _has_branches(run) else parts.get("mlp", 0)
        for name, value in experts_saved_bytes(run, layer).items():
            parts[name] = parts.get(name, 0) + value * (1 if _has_branches(run) else moe)
    return parts


def mean(parts: Sequence[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Return the mean of numbers by name, each with its share."""
    names = dict.fromkeys(name for numbers, _ in parts for name in numbers)
    return {
        name: sum(share * parts_of_kind.get(name, 0) for parts_of_kind, share in parts)
        for name in names
    }


def _has_branches(run: Run) -> bool:
    """Return whether each layer of a pipeline may have experts or not, and chooses by a branch."""
    return run.mesh.pp > 1 and run.shape.is_mixed


@of_tokens
def attention_workspace(run: Run) -> float:
    """Count cuDNN's bytes, outside XLA's plan, for the backward pass of attention over packed documents.

    They are float32 gradients of the queries, and one number of each query, for every document of a class that its call
    has room for (`hlo/attention.py`). Without documents it is one of each, and left to the margin of `plan/verdict.py`.
    """
    if len(run.kinds) > 1:
        return max(attention_workspace(one) for one, _ in run.kinds)
    if not run.packs_documents:
        return 0.0
    room = max(class_segments(run.seq_len // run.ring[0]))
    return 4 * room * layer_of(run).query * (1 + 1 / run.shape.head_dim)


@of_tokens
def document_mask(run: Run) -> float:
    """Count the bytes of the masks that attention reads where documents end inside a sequence; packed it reads none.

    On a ring that of the own block, and with a window of the blocks of the first step, which the backward pass uses
    again; blocks of documents alone have lengths.
    """
    if len(run.kinds) > 1:
        return max(document_mask(one) for one, _ in run.kinds)
    if layer_of(run).scores or not run.document_mask or run.packs_documents:
        return 0
    windowed = run.ring[0] > 1 and run.shape.sliding_window is not None
    shared = context.block_share(run) if windowed else 0
    return 2 * run.sequences * (run.seq_len / run.ring[0]) ** 2 * (1 + shared)


def kept_bytes(layers: Sequence[tuple[Run, int]]) -> dict[str, float]:
    """Count the bytes that layers keep for their backward pass, by kind; they are given as `Run.by_policy`."""
    parts: dict[str, float] = {}
    for run, count in layers:
        for name, size in saved_bytes(run).items():
            parts[name] = parts.get(name, 0) + count * size
    return parts


def dense_saved_bytes(run: Run, layer: Layer) -> dict[str, float]:
    """Count the bytes that a mean layer keeps from its forward to its backward pass, but for experts, by kind.

    full: its input. dots: products with parameters, attention's result and its log-sum-exp. selective: the named
    tensors of `train_step/remat.py`. none: also gate and up through silu and product, and each norm's float32 insides
    (3 arrays); the norms' results then are kept gathered over sp. `mlp_out` is kept only where a second norm reads it;
    else the next layer's input is.
    """
    a, i, policy = layer.width, layer.input_width, run.policy
    residual = layer.residual
    attention = _attention_bytes(run)
    halves = run.shape.halves_share
    mlp = run.shape.mlp_share * run.shape.wide_products * a * layer.ffn
    out_norms = 2 if run.shape.norm_placement == "both" else 0
    on_host = "layer_input" in remat_names(policy)[1]
    parts = {"layer inputs": 0 if on_host else a * residual}
    if policy == "full":
        return parts
    if policy == "selective":
        parts["attention"] = sum(attention.values())
        parts["mlp"] = mlp
        parts["norms"] = halves * 2 * i * residual + a * residual * (out_norms > 0)
    elif policy == "dots":
        parts["attention"] = _products_of_attention(run, layer)
        parts["mlp"] = mlp
        parts["norms"] = a * residual * (out_norms > 0)
    elif policy == "none":
        parts["layer inputs"] = 0
        parts["attention"] = _whole_attention(run, layer)
        parts["mlp"] = 3 * mlp
        parts["norms"] = halves * (12 * (2 + out_norms) * residual + 2 * i * layer.whole)
    else:
        parts |= _named_bytes(run, layer, remat_names(policy)[0])
    return parts


def _named_bytes(run: Run, layer: Layer, names: Sequence[str]) -> dict[str, float]:
    """Count the bytes of a mean layer's tensors of these names, by kind; `mlp_out` where a norm reads it."""
    a, attention, shape = layer.width, _attention_bytes(run), run.shape
    normed = ("attn_norm", "mlp_norm", *(["mlp_out"] * (shape.norm_placement != "pre")))
    return {
        "attention": sum(attention.get(name, 0) for name in names),
        "mlp": shape.mlp_share * a * layer.ffn * _wide(run, names),
        "norms": shape.halves_share * a * layer.residual * sum(name in normed for name in names),
    }


def _wide(run: Run, names: Collection[str]) -> int:
    """Count the names that are of a feed-forward layer's `wide_products`."""
    return ("up" in names) + ("gate" in names and run.shape.is_gated)


@of_tokens
def _attention_bytes(run: Run) -> dict[str, float]:
    """Count the bytes of the named tensors of a mean layer's attention."""
    layer = layer_of(run)
    a, query, key, shape = layer.width, layer.query, layer.key, run.shape
    full = {
        "q": a * query,
        "k": a * key,
        "v": a * key * (not shape.values_are_keys),
        "attn_gate": a * query * shape.output_gate,
        "attn_core": a * query + 4 * layer.statistics,
    }
    linear = linear_attention.named_bytes(run, a)
    shares = shape.full_share, shape.linear_share
    means = {name: shares[0] * size + shares[1] * linear[name] for name, size in full.items()}
    return means | {"attn_out": shape.mixer_share * a * layer.residual}


def _products_of_attention(run: Run, layer: Layer) -> float:
    """Count the bytes of a mean layer's attention that `dots` keeps: products with parameters, and its result."""
    attention = _attention_bytes(run)
    in_memory = run.shape.full_share * layer.width * layer.query
    # Scores in memory are computed again, and attention's result with them.
    return sum(attention.values()) - (0 if layer.statistics else in_memory)


def _whole_attention(run: Run, layer: Layer) -> float:
    """Count the bytes of a mean layer's attention that `none` keeps, without its output."""
    a, query, key, shape = layer.width, layer.query, layer.key, run.shape
    qk_norms = 12 * (query + key) if shape.qk_norm != "none" else 0
    qk_norms += 12 * key * shape.value_norm + a * key * shape.values_are_keys
    scores = (4 + a) * layer.scores if run.mesh.cp == 1 else 0
    quantized = query if run.precision == "fp8" else 0
    gates = 8 * query * shape.output_gate
    named = _attention_bytes(run)
    named = sum(named.values()) - named["attn_out"]
    full = shape.full_share * (quantized + qk_norms + scores + gates)
    return named + full + shape.linear_share * linear_attention.unnamed_bytes(run, a)


@of_layer
def offloaded_bytes(run: Run) -> float:
    """Count the bytes of a mean layer's activations that wait for its backward pass in the host's memory."""
    names = remat_names(run.policy)[1]
    if not names:
        return 0.0
    kept = saved_bytes(run.with_remat(Keep(saved=names)))
    return sum(kept.values()) - ("layer_input" not in names) * kept["layer inputs"]


def returning_bytes(run: Run) -> float:
    """Count the bytes of a layer's activations that return from the host while the next layer computes."""
    return offloaded_bytes(run) if run.lowering.gathers_ahead else 0.0


def experts_saved_bytes(run: Run, layer: Layer) -> dict[str, float]:
    """Count the bytes that a layer of experts keeps instead of the feed-forward layer, by kind.

    selective: the rows that a GPU got, and of them gate and up. none: also the rows by expert, and gate and up through
    silu, product and weights, once in float32; the router's float32 input, but its input gathered over sp not.
    """
    shape, a, wide = run.shape, layer.width, run.shape.wide_products
    rows, ffn = experts.expert_values(run)
    shared = shape.shared_width * run.tokens / run.mesh.tensor * (not _has_branches(run))
    got = a * experts.a2a_rows(run) * shape.d_model
    if run.policy == "selective":
        return {"mlp": wide * a * (ffn + shared), "dispatch": got}
    if run.policy == "dots":
        return {"mlp": wide * a * shared}
    if run.policy == "none":
        mlp = (3 * wide * a + 4) * ffn + 3 * wide * a * shared
        norms = 4 * layer.residual - layer.input_width * layer.whole
        return {"mlp": mlp, "dispatch": got + a * rows, "norms": norms}
    saved = remat_names(run.policy)[0]
    return {
        "mlp": a * _wide(run, saved) * (ffn + shared),
        "dispatch": got * ("dispatched" in saved),
    }


def mtp_saved_bytes(run: Run, layer: Layer) -> float:
    """Count the bytes that a module of `model.mtp_layers` keeps in addition to its layer's.

    Its two inputs; without recomputation the projection's input too, and three norms' float32 insides (3 arrays each).
    """
    kept = 2 * layer.width * layer.residual
    return kept + (2 * layer.input_width + 36) * layer.residual if run.policy == "none" else kept


@of_layer
def working_set(run: Run) -> float:
    """Count the bytes of activations that the backward pass of one layer has in hand at its largest moment.

    In the feed-forward layer: the product and two gradients, recomputed parts of gate and up, and of attention's
    projection with the gradient that it adds to; or in attention the scores where they are in memory, value and
    gradient in float32 and in the type of compute; or a ring's blocks. Ranks that exchange heads have queries and
    result in both layouts, and keys and values.
    """
    if len(run.kinds) > 1:
        return max(working_set(one) for one, _ in run.kinds)
    layer, shape = layer_of(run), run.shape
    a = layer.width
    wide = {"none": 2, "selective": 3, "dots": 3}.get(str(run.policy), 4)
    dense = shape.d_ff if shape.dense_layers else 0
    ffn = run.tokens / run.mesh.tensor * max(dense, shape.shared_width)
    mlp = a * ffn * (wide - (not shape.is_gated))
    places, exchanging = run.ring
    exchanged = 0.0
    if places == 1:  # the terms of a ring have these
        mlp += 2 * a * layer.residual * (not keeps(run.policy, "attn_out"))
        exchanged = a * (2 * layer.query + 3 * layer.key) * (exchanging > 1)
    repeated = context.repeated_forward_bytes(run, a)
    attention = max(2 * (4 + a) * layer.scores, context.backward_bytes(run, a))
    if shape.linear is not None:
        # The weight gradients of a dense feed-forward layer wait for attention's.
        attention = max(attention, mlp + repeated + linear_attention.backward_bytes(run, a))
        attention += a * (shape.layer_group - 1) * layer.residual  # inputs of the row's layers
    mlp = max(mlp, experts_working_set(run, layer)) + repeated
    gathered = 2 if run.mesh.sp > 1 else 0
    # Inputs of the norms after the half-blocks, once in float32.
    normed = 2 * (a + 4) * layer.residual if shape.norm_placement == "both" else 0
    return (
        max(mlp, attention)
        + normed
        + exchanged
        + a * ((2 + gathered) * layer.whole + 2 * layer.residual + 2 * layer.query)
    )


def experts_working_set(run: Run, layer: Layer) -> float:
    """Count the bytes of activations that the backward pass of the routed experts has in hand.

    The rows as they came at each exchange, and by expert, with their gradients; and gate, up, their product's gradient,
    the product and their gradients where the first round repeats gate and up. A loop of further rounds, whose buffers
    have an eighth of the rows, takes no more.
    """
    if run.shape.experts is None:
        return 0.0
    rows, ffn = experts.expert_values(run)
    wide = run.shape.wide_products
    got = experts.num_chunks(run) * experts.received_rows(run) * run.shape.d_model
    came = max(got, experts.a2a_rows(run) * run.shape.d_model)
    saved, offloaded = remat_names(run.policy)
    kept = run.policy in ("none", "selective") or _wide(run, {*saved, *offloaded}) == wide
    first = 2 + wide * (1 if kept else 2)
    return layer.width * (first * ffn + 2 * rows + 2 * came)


@of_tokens
def experts_forward_bytes(run: Run) -> float:
    """Count the bytes of gate, up and their product, which the forward pass of the routed experts has in hand."""
    if run.shape.experts is None:
        return 0.0
    rows, ffn = experts.expert_values(run)
    return layer_of(run).width * (
        (run.shape.wide_products + 1) * ffn + 2 * rows + experts.a2a_rows(run) * run.shape.d_model
    )


@of_tokens
def loss_chunks(run: Run) -> tuple[int, float]:
    """Count the chunks into which `models/loss.py` cuts a device's tokens, and the bytes of one's exponentials.

    Distillation has two models' logits in their place, stored logits too, and their gradient in the type of
    compute; a capped logit its float32 value and its gradient. In fp8 cuBLASLt writes the logits in float32 first.
    """
    tokens = run.sequences * run.seq_len // run.mesh.cp
    width = DISTILLED if run.teaches or run.top_k else 4 if run.precision == "fp32" else 2
    width = CAPPED if run.shape.logit_cap else width
    parts = run.mesh.tensor * run.mesh.pp
    vocab_size = padded_vocab_size(run.shape.vocab_size, parts) // parts
    chunks = num_chunks(tokens, vocab_size, width)
    token_bytes = 8 + layer_of(run).width if width == DISTILLED else width
    token_bytes += 4 * (run.precision == "fp8" and width == 2)
    return chunks, token_bytes * tokens * vocab_size / chunks
