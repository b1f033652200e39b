"""Rows of parity: a covering design. Every legal pair of the values below stands in at least one row.

`python -m tests.parity.rows` prints the pairs, the rows of each and the pairs that are missing;
`python -m tests.parity.rows docs DAY` writes, after the rows passed on that day, the last lines of
`docs/parity.md`, and `docs/parity_pairs.csv`.
"""

import csv
import dataclasses
import functools
import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tests.runs import change
from ultrascale_jax.config import (
    AXES,
    FP8,
    SCHEDULES,
    Config,
    DataConfig,
    Experts,
    FullAttention,
    Keep,
    LatentAttention,
    LinearAttention,
    Lora,
    ModelConfig,
    Multipliers,
    OptimConfig,
    Split,
    Strategy,
    TrainConfig,
    UserError,
)
from ultrascale_jax.config.lora import projections

DOCS = Path(__file__).parents[2] / "docs/parity.md"
PAIRS = DOCS.with_name("parity_pairs.csv")

PRECISIONS = ("fp32", "bf16", *FP8)
"""Fp16 is bf16's program with a scale of the loss, which `tests/unit/train_step/test_loss_scale.py` tests."""

BASE = Config(
    model=ModelConfig(
        vocab_size=64, d_model=16, d_ff=32, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=16),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(steps=2, global_batch=16, microbatches=4, precision="fp32", z_loss=1e-3),
)
"""Five layers: no number of stages divides them, so that some stages have rows of padding."""

EXPERTS = Experts(num=4, top_k=2, d_ff=8)
SINKS = {"attention_sinks": True, "sliding_window": 5, "nope_every": 2, "rope_dim": 4}
SINKS |= {"embed_scale": 12.0, "residual_scale": 0.5, "logit_divisor": 2.0}
LATENT = {
    "num_kv_heads": 4,
    "head_dim": 12,
    "latent": LatentAttention(q_rank=16, kv_rank=16, rope_dim=4, v_dim=8),
}
LINEAR = {
    "num_layers": 6,
    "full_attention_every": 2,
    "linear": LinearAttention(key_heads=4, value_heads=8, key_dim=4, value_dim=6),
    "output_gate": True,
    "qk_norm": "head",
}
NEMOTRON = {
    "activation": "relu2",
    "nope_every": 1,
    "linear": LinearAttention(rule="mamba2", key_heads=4, value_heads=8, key_dim=4, value_dim=6),
}
GEMMA4 = {
    "num_layers": 6,
    "sliding_window": 5,
    "full_attention_every": 2,
    "full_attention": FullAttention(
        num_kv_heads=1, head_dim=16, rope_share=0.5, values_are_keys=True
    ),
    "rope_theta_local": 1e3,
    "qk_norm": "head",
    "value_norm": True,
    "query_scale": 16.0,
    "logit_cap": 8.0,
    "layer_scale": True,
}
# A vocabulary of 65 is padded wherever an axis splits it.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "sinks": SINKS | {"tied_embeddings": True, "vocab_size": 65},
    "experts": SINKS | {"experts": EXPERTS},
    "gpt_oss": SINKS
    | {"activation": "clamped_swiglu", "qkv_bias": True, "o_bias": True}
    | {"experts": dataclasses.replace(EXPERTS, biases=True)},
    "linear": LINEAR | {"rope_dim": 4, "attention_sinks": True},
    "mamba": LINEAR
    | {
        "linear": LinearAttention(
            rule="mamba2", key_heads=1, value_heads=8, key_dim=4, value_dim=6
        ),
        "full_attention_offset": 1,
        "nope_every": 1,
        "activation": "relu2",
    },
    "nemotron": NEMOTRON
    | {
        "num_layers": 4,
        "pattern": "MM*E*E",
        "experts": dataclasses.replace(EXPERTS, shared=1, scores="sigmoid", bias=True),
    },
    "nemotron_rows": NEMOTRON
    | {"num_layers": 8, "pattern": 4 * "M*E"}
    | {"experts": dataclasses.replace(EXPERTS, bias=True)},
    "falcon_h1": {
        "linear": LinearAttention(
            rule="mamba2",
            key_heads=1,
            value_heads=8,
            key_dim=4,
            value_dim=6,
            norm=False,
            beside_attention=True,
        ),
        "multipliers": Multipliers(
            attn_o=0.9,
            mlp_gate=0.8,
            mlp_down=0.7,
            linear_q=1.5,
            linear_k=1.2,
            linear_v=0.6,
            linear_z=1.3,
            linear_a=0.5,
            linear_o=0.4,
        ),
    },
    "qwen3_next": LINEAR
    | {"attention_sinks": True}
    | {"experts": dataclasses.replace(EXPERTS, shared=1, shared_gate=True, bias=True)},
    "gemma4": GEMMA4 | {"tied_embeddings": True, "vocab_size": 65},
    "latent": LATENT
    | {"sliding_window": 5, "experts": EXPERTS, "vocab_size": 65, "activation": "relu2"},
    "deepseek": LATENT
    | {
        "latent": LatentAttention(q_rank=0, kv_rank=16, rope_dim=4, v_dim=8),
        "experts": dataclasses.replace(
            EXPERTS, shared=1, shared_gate=True, scores="sigmoid", bias=True, dense_layers=1
        ),
    },
}
BALANCED = {"aux_weight": 0.1, "aux_over": "sequence", "z_loss": 0.01}
OFFLOADED = Keep(saved=("q",), offloaded=("layer_input", "gate"))
BY_LAYER = (
    Split(first="full", layers=1, last="selective"),
    Split(first=OFFLOADED, layers=3, last="dots"),
)
ADAPTERS = {"lora": Lora(rank=4, rslora=True), "init_from": "hf:x"}


class Row(NamedTuple):
    """One run: two devices on each axis of `axes`, which is compared with one device."""

    model: str
    axes: str
    precision: str = "fp32"
    schedule: str = "1f1b"
    strategy: str = "zigzag"
    zero: int = 3
    remat: str | Keep | Split = "none"
    plain: bool = False
    microbatches: int = 4
    documents: bool = True
    lora: bool = False
    folding: bool = False

    @property
    def name(self) -> str:
        """Return the row's values, for a test's name."""
        axes = self.axes.split()
        words = [self.model, *axes, *[self.schedule] * ("pp" in axes)]
        words += [
            *[self.strategy] * ("cp" in axes),
            self.precision,
            f"zero{self.zero}",
            str(self.remat),
        ]
        named = ["plain"] * self.plain + ["lora"] * self.lora + ["folding"] * self.folding
        return "-".join(words + named)

    @property
    def config(self) -> Config:
        """Return the checked configuration."""
        train = {
            "zero": self.zero,
            "remat": self.remat,
            "lowering": "plain" if self.plain else "auto",
        }
        train |= {"precision": self.precision, "microbatches": self.microbatches}
        train |= ADAPTERS if self.lora else {}
        cfg = change(
            BASE,
            model=MODELS[self.model],
            mesh=dict.fromkeys(self.axes.split(), 2) | ({} if "fsdp" in self.axes else {"fsdp": 1}),
            pp={"schedule": self.schedule},
            cp={"strategy": self.strategy},
            data={"document_mask": self.documents},
            moe=BALANCED | {"folding": self.folding} if "experts" in MODELS[self.model] else {},
            train=train,
        )
        if self.lora:  # also routed experts
            lora = dataclasses.replace(cfg.train.lora, targets=projections(cfg.model))
            cfg = change(cfg, train={"lora": lora})
        return cfg.check(2 ** len(self.axes.split()))


SEVEN_AXES = Row("experts", "pp dp fsdp ep cp sp tp", schedule="afab", microbatches=2)
"""All axes at once, on 128 devices."""

ROWS: tuple[Row, ...] = (
    Row("falcon_h1", "pp cp tp", schedule="afab", strategy="ring", zero=2, remat="full"),
    Row("sinks", "pp cp sp", schedule="afab", zero=0, remat="full", lora=True),
    Row("latent", "pp cp sp", schedule="afab", strategy="allgather", zero=1, remat="selective", plain=True),
    Row("sinks", "pp cp sp", schedule="afab", strategy="ulysses", zero=1, remat="dots"),
    Row("latent", "pp fsdp cp", strategy="ring", remat="full"),
    Row("sinks", "pp cp tp", zero=1, plain=True, lora=True),
    Row("falcon_h1", "pp fsdp cp", strategy="allgather", zero=0, remat="dots"),
    Row("sinks", "pp ep cp", strategy="ulysses", zero=2, remat="selective"),
    Row("sinks", "pp dp sp", remat="full", plain=True),
    Row("sinks", "pp cp tp", schedule="interleaved", strategy="allgather", remat="dots", microbatches=8, lora=True),
    Row("falcon_h1", "pp ep cp", schedule="interleaved", zero=2, remat="full", microbatches=8),
    Row("sinks", "pp cp tp", schedule="interleaved", strategy="ring", zero=0, plain=True, microbatches=8),
    Row("latent", "pp dp cp", schedule="interleaved", strategy="ulysses", zero=1, remat="selective", microbatches=8),
    Row("sinks", "pp fsdp sp", schedule="interleaved", zero=0, remat="selective", microbatches=8),
    Row("sinks", "pp dp cp", schedule="zb_uniform", strategy="allgather", zero=2, remat="full", plain=True),
    Row("sinks", "pp cp sp", schedule="zb_uniform", zero=1, remat="dots"),
    Row("latent", "pp cp tp", schedule="zb_uniform", strategy="ulysses", zero=0, remat="full", lora=True),
    Row("nemotron_rows", "pp fsdp ep", schedule="zb_uniform", zero=1, remat="dots", plain=True, lora=True),
    Row("sinks", "pp fsdp cp", schedule="zb_uniform", strategy="ring"),
    Row("sinks", "pp fsdp cp", schedule="zb_h1", strategy="ring", remat="selective", lora=True),
    Row("sinks", "pp cp sp", schedule="zb_h1", zero=1, remat="full", plain=True),
    Row("sinks", "pp cp tp", schedule="zb_h1", strategy="allgather", remat="dots"),
    Row("sinks", "pp dp cp", schedule="zb_h1", strategy="ulysses", zero=2),
    Row("linear", "pp dp sp", schedule="zb_h1", zero=0, remat="full", plain=True),
    Row("deepseek", "pp ep sp", schedule="zb_h1", zero=0, remat="selective", folding=True),
    Row("latent", "pp cp sp", schedule="zb_v", strategy="ring", zero=1, remat="full"),
    Row("sinks", "pp fsdp cp", schedule="zb_v", zero=2, remat=BY_LAYER[0], plain=True),
    Row("sinks", "pp dp cp", schedule="zb_v", strategy="allgather", zero=2, remat="full", lora=True),
    Row("falcon_h1", "pp fsdp cp", schedule="zb_v", strategy="ulysses", zero=0, remat="dots"),
    Row("gpt_oss", "pp ep tp", schedule="zb_v", remat="full", plain=True),
    Row("sinks", "pp cp tp", schedule="dualpipe_v", strategy="ring", remat="dots", lora=True),
    Row("latent", "pp fsdp cp", schedule="dualpipe_v", zero=2, remat="selective"),
    Row("gemma4", "pp dp cp", schedule="dualpipe_v", strategy="allgather", zero=0, remat="full"),
    Row("sinks", "pp cp tp", schedule="dualpipe_v", strategy="ulysses"),
    Row("falcon_h1", "pp ep sp", schedule="dualpipe_v", zero=1, remat="dots"),
    Row("sinks", "ep cp tp", strategy="ulysses", zero=0, remat="selective", plain=True, microbatches=2),
    Row("sinks", "dp ep cp", strategy="ring", zero=1, remat="full", microbatches=2),
    Row("sinks", "fsdp ep cp", strategy="allgather", zero=2, remat="dots", microbatches=2, lora=True),
    Row("sinks", "fsdp cp tp", remat=BY_LAYER[1], microbatches=2),
    Row("latent", "fsdp ep sp", zero=2, microbatches=2, folding=True),
    Row("gemma4", "fsdp sp tp", microbatches=2),
    Row("nemotron", "fsdp ep", microbatches=2),
)  # fmt: skip
"""Rows of `make test`, on eight devices, all in float32: the cheapest that have each pair.

A pipeline of sinks has 5,000 to 8,000 operations, of latent attention with experts 8,000 to 12,000, and of linear
attention 9,000, with cp 11,000 to 17,000."""

NIGHTLY_ROWS: tuple[Row, ...] = (
    Row("sinks", "pp cp tp", schedule="dualpipe_v", zero=2, remat="full"),
    Row("llama", "pp dp cp", schedule="zb_v", strategy="ring", zero=0, remat=BY_LAYER[0]),
    Row("qwen3_next", "pp fsdp cp", schedule="afab", strategy="ring", zero=1, remat="selective", plain=True, lora=True),
    Row("deepseek", "pp fsdp cp", schedule="afab", strategy="ulysses", zero=0),
    Row("mamba", "pp ep sp", zero=2, remat="dots", plain=True),
    Row("mamba", "pp dp cp", schedule="interleaved", zero=0, remat="full", microbatches=8),
    Row("linear", "pp ep cp", schedule="zb_h1", strategy="allgather", zero=0),
    Row("falcon_h1", "fsdp cp", strategy="allgather", remat="dots", microbatches=2),
    Row("latent", "fsdp ep cp", strategy="ring", zero=2, microbatches=2),
    Row("latent", "ep cp sp", zero=2, microbatches=2, lora=True, folding=True),
    Row("nemotron", "dp sp tp", zero=1, remat="selective", microbatches=2),
    Row("nemotron", "fsdp sp", remat="full", plain=True, microbatches=2, lora=True),
    Row("gpt_oss", "ep sp", plain=True, microbatches=2, folding=True),
    Row("latent", "pp dp fsdp", "bf16", schedule="afab", zero=1, remat="full"),
    Row("sinks", "pp cp fsdp", "fp8", schedule="afab", strategy="ulysses", remat="full", plain=True),
    Row("sinks", "pp ep sp", "fp8_rowwise", schedule="afab", zero=0, remat="full"),
    Row("sinks", "pp fsdp tp", "fp8_block", schedule="afab", remat="full"),
    Row("sinks", "pp fsdp tp", "mxfp8", schedule="afab", remat="full"),
    Row("sinks", "pp cp dp", "bf16", strategy="ring", zero=1, remat="selective", plain=True),
    Row("sinks", "pp dp ep", "fp8", zero=2, remat="selective", plain=True),
    Row("sinks", "pp cp fsdp", "fp8_rowwise", zero=0, remat="full"),
    Row("sinks", "pp fsdp sp", "fp8_block", zero=0, remat="full"),
    Row("sinks", "pp fsdp sp", "mxfp8", zero=0, remat="full"),
    Row("sinks", "pp ep tp", "bf16", schedule="interleaved", remat="selective", plain=True, microbatches=8),
    Row("sinks", "pp fsdp sp", "fp8", schedule="interleaved", zero=2, remat="full", plain=True, microbatches=8),
    Row("sinks", "pp cp dp", "fp8_rowwise", schedule="interleaved", strategy="ring", zero=0,
        remat="full", microbatches=8),
    Row("sinks", "pp cp dp", "fp8_block", schedule="interleaved", strategy="allgather", remat="full",
        microbatches=8),
    Row("sinks", "pp cp dp", "mxfp8", schedule="interleaved", strategy="allgather", remat="full",
        microbatches=8),
    Row("latent", "pp cp ep", "bf16", schedule="zb_uniform", strategy="ring", zero=2, remat="full", plain=True),
    Row("sinks", "pp dp", "fp8", schedule="zb_uniform", zero=1, remat="full"),
    Row("sinks", "pp fsdp", "fp8_rowwise", schedule="zb_uniform", zero=1, remat="full"),
    Row("sinks", "pp tp", "fp8_block", schedule="zb_uniform", remat="full", plain=True),
    Row("sinks", "pp tp", "mxfp8", schedule="zb_uniform", remat="full", plain=True),
    Row("latent", "pp cp sp", "bf16", schedule="zb_h1", strategy="ulysses", zero=0, remat="full"),
    Row("sinks", "pp sp tp", "fp8", schedule="zb_h1", zero=1, remat="full", plain=True),
    Row("sinks", "pp cp fsdp", "fp8_rowwise", schedule="zb_h1", strategy="allgather", zero=2, remat="full"),
    Row("sinks", "pp cp dp", "fp8_block", schedule="zb_h1", strategy="ring", zero=2, remat="full"),
    Row("sinks", "pp cp dp", "mxfp8", schedule="zb_h1", strategy="ring", zero=2, remat="full"),
    Row("sinks", "pp cp sp", "bf16", schedule="zb_v", strategy="ring", remat="selective", plain=True),
    Row("latent", "pp cp ep", "bf16", schedule="zb_v", remat="full"),
    Row("sinks", "pp cp tp", "fp8", schedule="zb_v", strategy="allgather", zero=1, remat="selective", plain=True),
    Row("sinks", "pp fsdp tp", "fp8_rowwise", schedule="zb_v", zero=1, remat="full"),
    Row("sinks", "pp cp sp", "fp8_block", schedule="zb_v", strategy="ulysses", zero=0, remat="full"),
    Row("sinks", "pp cp sp", "mxfp8", schedule="zb_v", strategy="ulysses", zero=0, remat="full"),
    Row("sinks", "pp cp sp", "bf16", schedule="dualpipe_v", strategy="ring", zero=0, remat="full", plain=True),
    Row("sinks", "pp fsdp", "fp8", schedule="dualpipe_v", zero=2, remat="full"),
    Row("sinks", "pp tp", "fp8_rowwise", schedule="dualpipe_v", zero=1, remat="full"),
    Row("sinks", "pp ep", "fp8_block", schedule="dualpipe_v", zero=0, remat="full", plain=True),
    Row("sinks", "pp ep", "mxfp8", schedule="dualpipe_v", zero=0, remat="full", plain=True),
    Row("sinks", "cp dp ep", "bf16", strategy="allgather", zero=0, microbatches=2, lora=True),
    Row("sinks", "cp dp fsdp", "fp8", strategy="ring", zero=1, microbatches=2),
    Row("latent", "cp dp ep", "fp8", strategy="allgather", zero=0, remat="full", plain=True, microbatches=2),
    Row("sinks", "cp dp ep", "fp8", remat="dots", microbatches=2, lora=True),
    Row("sinks", "cp fsdp sp", "fp8_rowwise", strategy="ulysses", zero=2, remat="dots", microbatches=2, lora=True),
    Row("latent", "ep sp tp", "fp8_rowwise", microbatches=2),
    Row("linear", "cp fsdp", "bf16", remat="full", lora=True),
    Row("gemma4", "cp fsdp tp", "bf16", remat="full", lora=True),
    Row("latent", "cp dp sp", "fp8_block", zero=1, microbatches=2),
    Row("latent", "cp dp sp", "mxfp8", zero=1, microbatches=2),
    Row("sinks", "cp dp ep", "fp8_block", strategy="ring", zero=1, remat="full", plain=True, microbatches=2, lora=True),
    Row("sinks", "cp dp ep", "mxfp8", strategy="ring", zero=1, remat="full", plain=True, microbatches=2, lora=True),
)  # fmt: skip
"""Rows of `make test-nightly`: models on more meshes in float32, and the precisions whose numbers are not those of one
device to 1e-5."""

TESTED = (*ROWS, SEVEN_AXES)

IN_SEGMENTS = {
    row.schedule: row
    for row in (*ROWS, *NIGHTLY_ROWS)
    if "pp" in row.axes and row.model == "sinks" and row.precision == "fp32"
}.values()
"""A row of each schedule, dualpipe_v's by night, which has as many loops as the trainer's; the others are one loop."""


def kind(row: Row) -> str:
    """Return what distinguishes the row's model; the rows of each kind are tests of one file."""
    kinds = {"experts": "experts", "linear": "linear", "attention_sinks": "sinks"}
    return next((kinds[field] for field in kinds if field in MODELS[row.model]), "dense")


def values(cfg: Config) -> Iterator[str]:
    """Yield each value, a key of `CHANGES`, that a checked configuration has."""
    model, train = cfg.model, cfg.train
    yield from (axis for axis, size in cfg.mesh.sizes.items() if size > 1)
    yield cfg.pp.schedule if cfg.mesh.pp > 1 else "no pipeline"
    if cfg.mesh.cp > 1:
        yield cfg.cp.strategy
    yield train.precision
    yield f"ZeRO {train.zero}"
    others = {
        "dense layers": model.dense_layers > 0,
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "linear attention": model.linear is not None,
        "sinks": model.attention_sinks,
        "windows": model.sliding_window is not None,
        "documents": cfg.data.document_mask,
        "micro-batches": train.microbatches > 1,
        "LoRA": train.lora.enabled,
    }
    yield from (name for name, present in others.items() if present)


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    **{axis: {"mesh": {axis: 2}} for axis in AXES},
    "no pipeline": {},
    **{name: {"mesh": {"pp": 2}, "pp": {"schedule": name}} for name in SCHEDULES},
    **{name: {"mesh": {"cp": 2}, "cp": {"strategy": name}} for name in get_args(Strategy)},
    **{name: {"train": {"precision": name}} for name in PRECISIONS},
    **{f"ZeRO {stage}": {"train": {"zero": stage}} for stage in range(4)},
    "dense layers": {},
    "experts": {"model": {"experts": EXPERTS}},
    "latent attention": {"model": LATENT},
    "linear attention": {"model": LINEAR},
    "sinks": {"model": {"attention_sinks": True}},
    "windows": {"model": {"sliding_window": 5}},
    "documents": {"data": {"document_mask": True}},
    "micro-batches": {},
    "LoRA": {"train": ADAPTERS},
}
"""Value to the fields that a run needs for it; `BASE` has dense layers and micro-batches."""

Pair = tuple[str, str]


def with_values(pair: Pair) -> Config | None:
    """Return a configuration with both values; None if `Config.check` refuses it, or if it cannot have both."""
    sections: dict[str, dict[str, Any]] = {"mesh": {"fsdp": 1}}
    for name in pair:
        for section, fields in CHANGES[name].items():
            sections[section] = sections.get(section, {}) | fields
    if "experts" in pair and "dense layers" in pair:
        sections["model"]["experts"] = dataclasses.replace(EXPERTS, dense_layers=1)
    try:
        cfg = change(BASE, **sections)
        cfg = cfg.check(math.prod(cfg.mesh.sizes.values()))
    except UserError:
        return None
    return cfg if set(pair) <= set(values(cfg)) else None


@functools.cache
def legal_pairs() -> tuple[Pair, ...]:
    """Return each pair of values that one run may have, in the order of `CHANGES`."""
    return tuple(pair for pair in itertools.combinations(CHANGES, 2) if with_values(pair))


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs that a row has."""
    present = set(values(row.config))
    return set(itertools.combinations([name for name in CHANGES if name in present], 2))


def rows_of_pairs(rows: Iterable[Row]) -> dict[Pair, list[Row]]:
    """Return those of `rows` that each legal pair has."""
    by_pair: dict[Pair, list[Row]] = {pair: [] for pair in legal_pairs()}
    for row in rows:
        for pair in pairs_of(row):
            by_pair[pair].append(row)
    return by_pair


MARK = "<!-- The lines below are written by `python -m tests.parity.rows docs DAY`. -->\n"


ONE_OF = (
    ("no pipeline", *SCHEDULES),
    get_args(Strategy),
    PRECISIONS,
    tuple(name for name in CHANGES if name.startswith("ZeRO")),
)
"""Values of which a run has one: the schedule, the strategy, the precision and the stage of ZeRO."""


def page(day: str) -> str:
    """Return the page of the documentation: its prose as it is, and its last lines anew, of rows that ran on `day`."""
    legal, refused = set(legal_pairs()), dict[str, list[str]]()
    rounded = [row for row in NIGHTLY_ROWS if row.precision != "fp32"]
    for pair in itertools.combinations(CHANGES, 2):
        if pair not in legal and not any(set(pair) <= set(group) for group in ONE_OF):
            refused.setdefault(pair[1], []).append(pair[0])
    lines = [
        f"{len(CHANGES)} values have {len(legal)} legal pairs, whose numbers of rows are in "
        f"[{PAIRS.name}]({PAIRS.name}). {len(TESTED)} rows of `make test` have those in float32 (last run: {day}), and "
        f"{len(rounded)} rows of `make test-nightly` those in another precision.",
        "",
        "A run has one schedule, one strategy, one precision and one stage of ZeRO. It also cannot have",
        "",
        *(f"* {name} with {', '.join(others)}" for name, others in refused.items()),
    ]
    return DOCS.read_text().split(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


def table() -> str:
    """Return the CSV of the pairs: the number of rows with both values, and - where no run may have both."""
    by_pair = rows_of_pairs((*TESTED, *NIGHTLY_ROWS))
    counts = {frozenset(pair): len(rows) for pair, rows in by_pair.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rows with both", *CHANGES])
    for name in CHANGES:
        writer.writerow([name, *(counts.get(frozenset((name, other)), "-") for other in CHANGES)])
    return text.getvalue()


def day_of_page() -> str:
    """Return the day of the last run that the page names."""
    return DOCS.read_text().split("(last run: ")[1].split(")")[0]


def main(words: list[str]) -> None:
    match words:
        case ["docs", day]:
            DOCS.write_text(page(date.fromisoformat(day).isoformat()))
            PAIRS.write_text(table())
            return
        case [_, *_]:
            sys.exit("usage: python -m tests.parity.rows [docs DAY]")
    for pair, rows in rows_of_pairs((*TESTED, *NIGHTLY_ROWS)).items():
        print(f"{' x '.join(pair)}: {', '.join(row.name for row in rows) or 'MISSING'}")


if __name__ == "__main__":
    main(sys.argv[1:])
