"""Train random models on random meshes by the command line, and on one device: equal, or refused before the first step.

A seed fixes its model, mesh and run; one that fails becomes a row of `tests/parity`.
"""

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale_jax.config import (
    AXES,
    SCHEDULES,
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    Multipliers,
    RopeScaling,
)
from ultrascale_jax.config.pattern import layers_of

TOLERANCE = 1e-5
DEVICES = 8
LIMIT_S = 900
REFUSED = 2
"""Exit code of a command whose configuration is refused."""

RUN = {
    "data.source": "synthetic",
    "data.seq-len": 32,
    "optim.lr": 1e-3,
    "optim.eps": 1e-3,  # a smaller one makes updates of rounding where a gradient is zero
    "train.steps": 3,
    "train.global-batch": 16,
    "train.precision": "fp32",
    "train.eval-batches": 1,
}
PLAIN = {"train.zero": 0, "train.remat": "none", "train.lowering": "plain"}
"""How the one device trains, without a mesh, a pipeline and context parallelism."""

type Flags = dict[str, Any]


def draw_model(rng: random.Random) -> Flags:
    """Return a value for each field of `ModelConfig`, and of the sections in it that the model has."""
    heads = rng.choice((4, 8))
    kind = rng.choice(("dense", "dense", "experts", "experts", "latent", "latent experts"))
    latent, experts = "latent" in kind, "experts" in kind
    window = rng.choice((None, 5, 12))
    full_every = rng.choice((0, 2, 3)) if window else 0
    layers = rng.randint(2, 5)
    model: Flags = {
        "vocab_size": rng.choice((64, 256)),
        "d_model": rng.choice((16, 32)),
        "d_ff": rng.choice((32, 64)),
        "activation": rng.choice(("silu", "gelu_tanh", "clamped_swiglu")),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads if latent else rng.choice((heads // 2, heads)),
        "head_dim": rng.choice((8, 16)),
        "norm_eps": rng.choice((1e-5, 1e-6)),
        "norm_placement": "pre" if experts else rng.choice(("pre", "post", "both")),
        "qk_norm": "none" if latent else rng.choice(("none", "head", "full")),
        "qkv_bias": not latent and rng.random() < 0.5,
        "o_bias": not latent and rng.random() < 0.3,
        "attention_sinks": not latent and rng.random() < 0.3,
        "value_norm": not latent and rng.random() < 0.3,
        "values_are_keys": not latent and rng.random() < 0.2,
        "query_scale": 0.0 if latent else rng.choice((0.0, 24.0)),
        "tied_embeddings": rng.random() < 0.3,
        "embed_scale": rng.choice((0.0, 1.0, 1.0, 12.0)),
        "residual_scale": rng.choice((1.0, 1.0, 0.22)),
        "logit_divisor": rng.choice((1.0, 1.0, 8.0)),
        "logit_cap": rng.choice((0.0, 0.0, 2.0)),
        "layer_scale": rng.random() < 0.2,
        "rope_theta": rng.choice((1e4, 5e5)),
        "rope_theta_local": rng.choice((0.0, 1e4)) if full_every else 0.0,
        "sliding_window": window,
        "first_window_layer": rng.choice((0, 1)) if window and not full_every else 0,
        "full_attention_every": full_every,
        "rope_dim": 0 if latent else rng.choice((0, 0, 4)),
        "rope_share": rng.choice((1.0, 1.0, 0.5)),
        "nope_every": rng.choice((0, 0, 2)),
        "mtp_layers": rng.choice((0, 0, 0, 1)),
    }
    model |= prefixed("rope_scaling", draw_rope_scaling(rng) if rng.random() < 0.4 else {})
    model |= prefixed("experts", draw_experts(rng, layers) if experts else {})
    if not latent:
        model["output_gate"] = rng.random() < 0.2
        model |= draw_linear(rng, experts) if rng.random() < 0.2 else draw_full(rng, model)
    return model | prefixed("latent", draw_latent(rng) if latent else {})


def draw_linear(rng: random.Random, experts: bool) -> Flags:
    every = rng.choice((0, 2, 3))
    without = {"sliding_window": None, "first_window_layer": 0, "rope_theta_local": 0.0}
    layers = {"num_layers": (every or 1) * rng.randint(1, 3), "full_attention_every": every}
    layers["full_attention_offset"] = rng.randrange(every or 1)
    rule = rng.choice(("delta", "mamba2"))
    sizes = {"key_dim": 8, "value_dim": rng.choice((4, 8)), "conv_kernel": rng.choice((2, 4))}
    heads = {"key_heads": rng.choice((1, 4)), "value_heads": rng.choice((4, 8)), "rule": rule}
    heads["norm"] = rule == "delta" or rng.random() < 0.5
    heads["beside_attention"] = beside = not every and rng.random() < 0.5
    names = ["linear_q", "linear_k", "linear_v", "linear_z", "linear_a", "linear_o"]
    names += [] if experts else ["mlp_gate", "mlp_down"]
    names += ["attn_o"] if every or beside else []
    multipliers = {name: rng.choice((0.5, 1.5)) for name in names} if rng.random() < 0.5 else {}
    heads["step_min"] = rng.choice((0.0, 0.1)) if rule == "mamba2" else 0.0
    dense = {"experts.dense_layers": 0} if experts else {}
    model = (
        without
        | layers
        | {"nope_every": rng.choice((0, 1))}
        | ({"o_bias": False} if beside else {})
        | dense
        | prefixed("linear", sizes | heads)
    )
    if rng.random() < 0.3:
        return model | draw_pattern(rng, "E" if experts else "-")
    return model | prefixed("multipliers", multipliers)


def draw_pattern(rng: random.Random, feed_forward: str) -> Flags:
    """Return layers of several kinds in any order, some of them with linear attention."""
    halves = ["M", feed_forward, *rng.choices(["M", "*", feed_forward], k=rng.randint(1, 5))]
    rng.shuffle(halves)
    pattern = "".join(halves)
    without = {"full_attention_every": 0, "full_attention_offset": 0, "mtp_layers": 0}
    without |= {"layer_scale": False, "linear.beside_attention": False}
    # With norms after the layers alone, rounding grows: one device in another number of micro-batches was 2e-5 off.
    without["norm_placement"] = "pre"
    return without | {"pattern": pattern, "num_layers": len(layers_of(pattern))}


def draw_full(rng: random.Random, model: Flags) -> Flags:
    """Return a shape of the attention of layers without a window, for half of the models that have both."""
    every, experts = model["full_attention_every"], "experts.num" in model
    if not every or rng.random() < 0.5:
        return {}
    sizes = {"num_kv_heads": rng.choice((1, 2, 4)), "head_dim": rng.choice((8, 16))}
    others = {"rope_share": rng.choice((0.5, 1.0)), "values_are_keys": rng.random() < 0.5}
    without = {
        "rope_dim": 0,
        "nope_every": 0,
        "mtp_layers": 0,
        "num_layers": every * rng.randint(1, 3),
    }
    without |= {"experts.dense_layers": 0} if experts else {}
    return without | prefixed("full_attention", sizes | others)


def draw_rope_scaling(rng: random.Random) -> Flags:
    kind = rng.choice(("linear", "yarn", "llama3"))
    yarn = kind == "yarn"
    return {
        "kind": kind,
        "factor": rng.choice((2.0, 8.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": rng.choice((0.0, 4.0)),
        "original_seq_len": rng.choice((16, 32)),
        "attention_factor": rng.choice((0.0, 1.2)) if yarn else 0.0,
        "mscale_all_dim": rng.choice((0.0, 1.0)) if yarn else 0.0,
        "truncate": not yarn or rng.random() < 0.5,
        "query_beta": 0.1 if rng.random() < 0.2 else 0.0,
    }


def draw_experts(rng: random.Random, layers: int) -> Flags:
    num, groups, shared = rng.choice((4, 8)), rng.choice((1, 2)), rng.choice((0, 1))
    return {
        "num": num,
        "top_k": rng.choice((1, 2)),
        "d_ff": rng.choice((0, 16)),
        "shared": shared,
        "shared_gate": shared > 0 and rng.random() < 0.3,
        "dense_layers": rng.choice((0, min(1, layers - 1))),
        "scores": rng.choice(("softmax", "sigmoid")),
        "normalize": rng.random() < 0.5,
        "scale": rng.choice((1.0, 2.5)),
        "groups": groups,
        "groups_per_token": rng.randint(1, groups),
        "bias": rng.random() < 0.3,
        "biases": rng.random() < 0.3,
    }


def draw_latent(rng: random.Random) -> Flags:
    return {
        "q_rank": rng.choice((0, 16)),
        "kv_rank": 16,
        "rope_dim": rng.choice((2, 4)),
        "v_dim": rng.choice((4, 8)),
    }


SECTIONS = {
    "rope_scaling": RopeScaling,
    "experts": Experts,
    "latent": LatentAttention,
    "linear": LinearAttention,
    "full_attention": FullAttention,
    "multipliers": Multipliers,
}
"""Fields of `ModelConfig` that are sections."""


def undrawn(seeds: int = 200) -> set[str]:
    """Return the fields of a model that none of so many seeds sets: a new field must be drawn, too."""
    models = [draw_model(random.Random(seed)) for seed in range(seeds)]
    names = {field.name for field in dataclasses.fields(ModelConfig)} - SECTIONS.keys()
    for section, cls in SECTIONS.items():
        names |= {f"{section}.{field.name}" for field in dataclasses.fields(cls)}
    return names - {name for model in models for name in model}


def prefixed(section: str, fields: Flags) -> Flags:
    return {f"{section}.{name}": value for name, value in fields.items()}


def draw_mesh(rng: random.Random, devices: int) -> dict[str, int]:
    """Return sizes of axes that multiply to `devices`, a power of two."""
    sizes = dict.fromkeys(AXES, 1)
    for _ in range(devices.bit_length() - 1):
        sizes[rng.choice(AXES)] *= 2
    return sizes


def draw_run(rng: random.Random) -> tuple[Flags, Flags]:
    """Return the flags that change the numbers of a run, and the flags that must not change them."""
    numbers = {
        "train.microbatches": rng.choice((1, 2, 4)),
        "train.z-loss": rng.choice((0.0, 1e-3)),
        "train.seed": rng.randint(0, 1000),
        "data.document-mask": rng.random() < 0.6,
        "moe.aux-weight": rng.choice((0.0, 0.1)),
        "moe.aux-over": rng.choice(("batch", "sequence")),
        "moe.z-loss": rng.choice((0.0, 0.01)),
    }
    mesh = {
        "mesh": ",".join(f"{axis}={size}" for axis, size in draw_mesh(rng, DEVICES).items()),
        "pp.schedule": rng.choice(SCHEDULES),
        "pp.stash": rng.choice(("residuals", "residuals", "input")),
        "cp.strategy": rng.choice(("ring", "zigzag", "allgather", "ulysses")),
        "train.zero": rng.randint(0, 3),
        "train.remat": rng.choice(("none", "selective", "dots", "full")),
        "train.lowering": rng.choice(("auto", "plain")),
        "moe.capacity-factor": rng.choice((1.0, 1.25, 2.0)),
    }
    return numbers, mesh


def to_words(flags: Flags) -> list[str]:
    """Return the flags as they are typed; a switch is `--x.y` or `--x.no-y`."""
    words = []
    for name, value in flags.items():
        section, _, field = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{section}.{'' if value else 'no-'}{field}")
        elif value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")  # a pattern may begin with -
    return words


def train(folder: Path, devices: int, flags: Flags) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ultrascale_jax", "train", "debug"]
    words = ["--fake-devices", str(devices), "--log.run-dir", str(folder), *to_words(flags)]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=LIMIT_S)


def read_numbers(folder: Path) -> np.ndarray:
    """Return losses and gradient norms of the steps, and the evaluation at the end."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = "loss", "grad_norm", "mtp_loss", "eval_loss"
    return np.array([np.mean(row[name]) for row in rows for name in names if name in row])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One seed: its command, and what came of it; `fault` is empty where the run is equal or refused."""

    seed: int
    words: str
    result: str
    fault: str = ""


def try_seed(seed: int, folder: Path) -> Outcome:
    """Train the model of a seed on its mesh and, unless the mesh is refused, on one device."""
    rng = random.Random(seed)
    model = prefixed("model", draw_model(rng))
    numbers, mesh = draw_run(rng)
    shared = RUN | model | numbers
    words = " ".join(to_words(shared | mesh))
    on_mesh = train(folder / "mesh", DEVICES, shared | mesh)
    if on_mesh.returncode == REFUSED:
        error = on_mesh.stderr.strip().splitlines()
        started = (folder / "mesh/metrics.jsonl").exists()
        plain = len(error) == 1 and "Traceback" not in error[0]
        fault = (
            "" if plain and not started else "refused, but not by one line before the first step"
        )
        return Outcome(seed, words, f"refused: {on_mesh.stderr.strip()}", fault)
    if on_mesh.returncode:
        return Outcome(seed, words, on_mesh.stderr[-2000:], f"exit code {on_mesh.returncode}")
    alone = train(folder / "alone", 1, shared | PLAIN | {"mesh": "dp=1"})
    if alone.returncode:
        return Outcome(seed, words, alone.stderr[-2000:], "one device alone fails")
    trained, expected = read_numbers(folder / "mesh"), read_numbers(folder / "alone")
    if trained.shape != expected.shape:
        return Outcome(seed, words, f"{trained}, {expected}", "not the same numbers on record")
    error = float(np.max(np.abs(trained - expected) / np.abs(expected)))
    fault = "" if math.isfinite(error) and error < TOLERANCE else f"relative error {error:.1e}"
    return Outcome(seed, words, f"equal to {error:.1e}", fault)
