"""The same model in PyTorch as its users would train it: compiled, flash attention, float32 master weights.

Weights and gradients are in the type of compute (bfloat16 on a GPU, no autocast); AdamW keeps float32 master weights
and moments, updates them in one compiled pass per tensor that also writes the weights, and clips by the global norm.
Attention is PyTorch's own (SDPA, grouped queries) on the quicker of its two flash backends, found by timing them.
"""

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import torch.nn.functional as F  # pyrefly: ignore[missing-import]
from torch import nn  # pyrefly: ignore[missing-import]
from torch.nn.attention import SDPBackend, sdpa_kernel  # pyrefly: ignore[missing-import]
from torch.utils.checkpoint import checkpoint  # pyrefly: ignore[missing-import]

from ultrascale_jax.cli.bench_peers.contestant import (
    Contestant,
    Unavailable,
    moment,
    resident_bytes,
    serve,
)


def rope_table(model: dict, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `[T, H / 2]`, float32."""
    half = model["head_dim"] // 2
    frequency = model["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
    if s := model["rope_scaling"]:
        if s["kind"] != "llama3":
            raise Unavailable(f"it knows the rope scaling llama3, not {s['kind']}")
        turns = s["original_seq_len"] * frequency / (2 * math.pi)
        low, high = s["freq_factors"][0], s["freq_factors"][1] or 4.0
        smooth = (turns - low) / (high - low)
        smooth = smooth.clamp(0, 1)
        frequency = (1 - smooth) * frequency / s["factor"] + smooth * frequency
    angle = torch.arange(seq_len)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary embeddings to `[B, N, T, H]`."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and gated MLP, each with its norm and residual connection."""

    def __init__(self, model: dict):
        super().__init__()
        D, self.N, self.K = (model[name] for name in ("d_model", "num_heads", "num_kv_heads"))
        H, self.F = model["head_dim"], model["d_ff"]
        self.attn_norm = nn.RMSNorm(D, eps=model["norm_eps"])
        self.w_qkv = nn.Linear(D, (self.N + 2 * self.K) * H, bias=False)
        self.w_o = nn.Linear(self.N * H, D, bias=False)
        self.mlp_norm = nn.RMSNorm(D, eps=model["norm_eps"])
        self.w_gate_up = nn.Linear(D, 2 * self.F, bias=False)
        self.w_down = nn.Linear(self.F, D, bias=False)

    def forward(self, x, rope):
        B, T, _ = x.shape
        heads = self.w_qkv(self.attn_norm(x)).view(B, T, self.N + 2 * self.K, -1).transpose(1, 2)
        q, k, v = heads.split([self.N, self.K, self.K], dim=1)
        q, k = rotate(q, rope), rotate(k, rope)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.N != self.K)
        x = x + self.w_o(h.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.w_gate_up(self.mlp_norm(x)).split(self.F, dim=-1)
        return x + self.w_down(F.silu(gate) * up)


class Llama(nn.Module):
    """Tokens and targets `[B, T]` to the mean cross-entropy."""

    def __init__(self, model: dict, seq_len: int, *, recompute: bool = False, loss_chunks: int = 1):
        super().__init__()
        self.recompute, self.loss_chunks = recompute, loss_chunks
        self.embed = nn.Embedding(model["vocab_size"], model["d_model"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["num_layers"]))
        self.final_norm = nn.RMSNorm(model["d_model"], eps=model["norm_eps"])
        self.head = nn.Linear(model["d_model"], model["vocab_size"], bias=False)
        for weight in (w for w in self.parameters() if w.ndim == 2):
            nn.init.normal_(weight, std=0.02)
        if model["tied_embeddings"]:
            self.head.weight = self.embed.weight
        self.rope = rope_table(model, seq_len)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.rope, use_reentrant=False)
            else:
                x = block(x, self.rope)
        x = self.final_norm(x).flatten(0, 1).chunk(self.loss_chunks)
        parts = zip(x, targets.flatten().chunk(self.loss_chunks), strict=True)
        if self.loss_chunks == 1:
            return self.sum_of_losses(*next(parts)) / targets.numel()
        losses = [checkpoint(self.sum_of_losses, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / targets.numel()

    def sum_of_losses(self, x, targets):
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def load(self, params: dict) -> None:
        """Copy the weights of `ultrascale_jax`, a nested dictionary of its parameters as NumPy arrays."""

        def put(weight: nn.Parameter, *arrays: np.ndarray) -> None:
            rows = [np.array(array).reshape(-1, weight.shape[-1]) for array in arrays]
            weight.data.copy_(torch.from_numpy(np.concatenate(rows)).view_as(weight))

        put(self.embed.weight, params["embed"])
        put(self.final_norm.weight, params["final_norm"])
        if self.head.weight is not self.embed.weight:
            put(self.head.weight, params["head"].T)
        attn, mlp = params["blocks"]["attn"], params["blocks"]["mlp"]
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            put(block.attn_norm.weight, params["blocks"]["attn_norm"][i])
            put(block.mlp_norm.weight, params["blocks"]["mlp_norm"][i])
            qkv = (np.moveaxis(attn[name][i], 0, -1) for name in ("w_q", "w_k", "w_v"))
            put(block.w_qkv.weight, *qkv)
            put(block.w_o.weight, np.moveaxis(attn["w_o"][i], -1, 0))
            put(block.w_gate_up.weight, mlp["w_gate"][i].T, mlp["w_up"][i].T)
            put(block.w_down.weight, mlp["w_down"][i].T)


class AdamW:
    """AdamW on float32 master weights, clipped by the global norm; weight decay on matrices only.

    Compiled it is one pass per tensor, which also casts; otherwise PyTorch's own fused one does the work.
    """

    def __init__(self, weights: list[nn.Parameter], optim: dict, *, compiled: bool):
        self.weights, self.optim = weights, optim
        self.master = [w.detach().to(torch.float32, copy=compiled) for w in weights]
        decays = [optim["weight_decay"] * (w.ndim > 1) for w in weights]
        if not compiled:
            groups = [
                {"params": [master], "weight_decay": decay}
                for master, decay in zip(self.master, decays, strict=True)
            ]
            self.fused = torch.optim.AdamW(
                groups, lr=optim["lr"], betas=optim["betas"], eps=optim["eps"], fused=True
            )
            self.step = self._fused_step
            return
        device = weights[0].device
        self.update = torch.compile(self._update, dynamic=True)
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.master]
        self.decays = [torch.tensor(decay, device=device) for decay in decays]
        self.step_number = torch.zeros((), device=device)
        self.step = self._compiled_step

    @torch.no_grad()
    def _fused_step(self) -> None:
        for w, master in zip(self.weights, self.master, strict=True):
            assert w.grad is not None
            master.grad, w.grad = w.grad.float(), None
        nn.utils.clip_grad_norm_(self.master, self.optim["clip_norm"])
        self.fused.step()
        for w, master in zip(self.weights, self.master, strict=True):
            if w.dtype != master.dtype:
                w.copy_(master)

    @torch.no_grad()
    def _compiled_step(self) -> None:
        grads = [w.grad for w in self.weights if w.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        scale = (self.optim["clip_norm"] / torch.stack(norms).norm()).clamp(max=1.0)
        self.step_number += 1
        tensors = zip(self.weights, grads, self.master, self.moments, self.decays, strict=True)
        for w, g, master, (m, v), decay in tensors:
            # Flat views, so that one compiled function serves tensors of every shape.
            flat = [tensor.view(-1) for tensor in (w.data, g, master, m, v)]
            self.update(flat, scale, self.step_number, decay)
            w.grad = None

    def _update(self, tensors, scale, step_number, decay) -> None:
        w, g, master, m, v = tensors
        (b1, b2), lr, eps = self.optim["betas"], self.optim["lr"], self.optim["eps"]
        g = g.float() * scale
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        update = (m / (1 - b1**step_number)) / ((v / (1 - b2**step_number)).sqrt() + eps)
        master.sub_(lr * (update + decay * master))
        w.copy_(master)


def choose_attention(model: dict, batch: int, seq_len: int) -> str:
    """Leave only the quickest flash backend of SDPA switched on for these shapes, and name it."""
    N, K, H = (model[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    shapes = ((batch, heads, seq_len, H) for heads in (N, K, K))
    q, k, v = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    )
    times = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with sdpa_kernel(backend):
                for n in range(8):
                    if n == 3:
                        start.record()
                    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=N != K)
                    torch.autograd.grad(out.sum(), (q, k, v))
                end.record()
            torch.cuda.synchronize()
            times[backend] = start.elapsed_time(end)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
    if not times:
        raise Unavailable("neither of PyTorch's flash attention backends takes these shapes")
    best = min(times, key=lambda backend: times[backend])
    torch.backends.cuda.enable_cudnn_sdp(best == SDPBackend.CUDNN_ATTENTION)
    torch.backends.cuda.enable_flash_sdp(best == SDPBackend.FLASH_ATTENTION)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    return best.name.lower()


def timed(step: Callable[[], object], num_steps: int) -> list[float]:
    """Return the seconds of each step, on a GPU by its own clock while the host runs ahead."""
    if not torch.cuda.is_available():
        marks = [time.perf_counter()]
        for _ in range(num_steps):
            step()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def make(spec: dict) -> Contestant:
    on_gpu = torch.cuda.is_available()
    if spec["needs_gpu"] and not on_gpu:
        raise Unavailable("torch sees no GPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    model, batch, seq_len = spec["model"], spec["batch"], spec["seq_len"]
    dtype = torch.bfloat16 if spec["precision"] == "bf16" else torch.float32
    torch.manual_seed(0)
    notes = {"attention": choose_attention(model, batch, seq_len) if on_gpu else "sdpa"}
    options = {name: spec[name] for name in ("recompute", "loss_chunks")}
    with torch.device(device):
        llama = Llama(model, seq_len, **options).to(dtype)
        rows = torch.randint(model["vocab_size"], (batch, seq_len + 1))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    compiled = on_gpu or spec["compile"]
    loss_fn = torch.compile(llama, fullgraph=not spec["recompute"]) if compiled else llama
    optimizer = AdamW(list(llama.parameters()), spec["optim"], compiled=compiled)

    def step() -> torch.Tensor:
        loss = loss_fn(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    begun = time.perf_counter()
    loss = step().item()
    first_step, first_s = moment(), time.perf_counter() - begun
    begun = time.perf_counter()
    step().item()
    ordinary_s = time.perf_counter() - begun
    return Contestant(
        run=lambda n: timed(step, n),
        peak_bytes=torch.cuda.max_memory_allocated if on_gpu else resident_bytes,
        compile_s=first_s - ordinary_s if compiled else 0.0,
        loss=loss,
        first_step=first_step,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        libraries=("torch",),
        notes={**notes, **{name: str(value) for name, value in options.items()}},
    )


if __name__ == "__main__":
    serve(make)
