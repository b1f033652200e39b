"""Rows of parity: a covering design. Every legal pair of the values below stands in at least one row of `ROWS`.

`python -m tests.parity.rows` prints the pairs, the rows of each and the pairs that are missing;
`python -m tests.parity.rows docs` writes the table of `docs/parity.md`.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tests.runs import change
from ultrascale_jax.config import (
    AXES,
    SCHEDULES,
    Config,
    DataConfig,
    Experts,
    LatentAttention,
    Lora,
    ModelConfig,
    OptimConfig,
    Strategy,
    TrainConfig,
    UserError,
)

DOCS = Path(__file__).parents[2] / "docs/parity.md"

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
SINKS = {"attention_sinks": True, "sliding_window": 5}
LATENT = {
    "num_kv_heads": 4,
    "head_dim": 12,
    "latent": LatentAttention(q_rank=16, kv_rank=16, rope_dim=4, v_dim=8),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "sinks": SINKS | {"qk_norm": "head", "tied_embeddings": True},
    "experts": SINKS
    | {"activation": "clamped_swiglu", "qkv_bias": True, "o_bias": True}
    | {"experts": dataclasses.replace(EXPERTS, biases=True, dense_layers=1)},
    "latent": LATENT
    | {"sliding_window": 5, "num_layers": 4}
    | {"experts": dataclasses.replace(EXPERTS, shared=1, scores="sigmoid", bias=True)},
    "latent_mixed": LATENT | {"experts": dataclasses.replace(EXPERTS, dense_layers=1)},
}
BALANCED = {"aux_weight": 0.1, "aux_over": "sequence", "z_loss": 0.01}
ADAPTERS = {"lora": Lora(rank=4, rslora=True), "init_from": "hf:x"}


class Row(NamedTuple):
    """One run: two devices on each axis of `axes`, which is compared with one device."""

    model: str
    axes: str
    schedule: str = "1f1b"
    strategy: str = "zigzag"
    zero: int = 3
    remat: str = "none"
    lowering: str = "auto"
    microbatches: int = 4
    documents: bool = True
    lora: bool = False
    evaluates: bool = False

    @property
    def name(self) -> str:
        """Return the row's values, for a test's name."""
        axes = self.axes.split()
        words = [self.model, *axes, *[self.schedule] * ("pp" in axes)]
        words += [*[self.strategy] * ("cp" in axes), f"zero{self.zero}", self.remat]
        return "-".join(words + ["plain"] * (self.lowering == "plain") + ["lora"] * self.lora)

    @property
    def config(self) -> Config:
        """Return the checked configuration."""
        train = {"zero": self.zero, "remat": self.remat, "lowering": self.lowering}
        train |= {"microbatches": self.microbatches} | (ADAPTERS if self.lora else {})
        cfg = change(
            BASE,
            model=MODELS[self.model],
            mesh=dict.fromkeys(self.axes.split(), 2) | ({} if "fsdp" in self.axes else {"fsdp": 1}),
            pp={"schedule": self.schedule},
            cp={"strategy": self.strategy},
            data={"document_mask": self.documents},
            moe=BALANCED if "experts" in MODELS[self.model] else {},
            train=train,
        )
        return cfg.check(2 ** len(self.axes.split()))


SEVEN_AXES = Row("experts", "pp dp fsdp ep cp sp tp", schedule="zb_h1", microbatches=2)
"""All axes at once, on 128 devices."""

ROWS: tuple[Row, ...] = (
    # Every schedule meets every kind of layer.
    Row("latent", "pp cp sp", schedule="afab", zero=0),
    Row("sinks", "pp cp ep", schedule="afab", strategy="ulysses", zero=2, remat="full"),
    Row("latent", "pp cp ep", zero=1, lowering="plain"),
    Row("llama", "pp cp tp", strategy="ulysses", remat="dots", lowering="plain", microbatches=2),
    Row("llama", "pp dp fsdp", zero=2, microbatches=2),
    Row("sinks", "pp cp sp", strategy="allgather", zero=0, lowering="plain"),
    Row("latent", "pp cp dp", schedule="interleaved", strategy="ulysses", zero=0, remat="selective"),
    Row("llama", "pp cp tp", schedule="interleaved", strategy="allgather", zero=1, lowering="plain", microbatches=2),
    Row("sinks", "pp cp sp", schedule="interleaved", strategy="ring", zero=2),
    Row("latent_mixed", "pp cp tp", schedule="zb_uniform", strategy="allgather", zero=2, remat="dots"),
    Row("sinks", "pp cp dp", schedule="zb_uniform", strategy="ring", lowering="plain"),
    Row("latent", "pp cp ep", schedule="zb_h1", strategy="allgather", zero=2, remat="full"),
    Row("latent", "pp cp fsdp", schedule="zb_v", strategy="ring", zero=0, remat="dots", lowering="plain"),
    Row("sinks", "pp cp dp", schedule="zb_v", zero=2, lowering="plain"),
    Row("latent", "pp cp fsdp", schedule="dualpipe_v", strategy="allgather", remat="full"),
    Row("sinks", "pp cp dp", schedule="dualpipe_v", strategy="ring", zero=1),
    # Without a pipeline, all parameters trained.
    Row("experts", "fsdp ep tp", zero=2, remat="full", evaluates=True),
    Row("latent", "ep cp sp", zero=1, remat="selective"),
    Row("llama", "fsdp sp tp", remat="selective"),
    # Adapters on a frozen base.
    Row("llama", "cp dp ep", strategy="allgather", lowering="plain", lora=True),
    Row("llama", "cp ep tp", strategy="ring", zero=0, remat="selective", microbatches=1, lora=True),
    Row("llama", "cp ep sp", zero=2, lowering="plain", lora=True),
    Row("sinks", "cp fsdp sp", strategy="ulysses", zero=1, remat="full", lora=True),
)  # fmt: skip
"""Rows of `make test`, on eight devices."""

WIDE_ROWS: tuple[Row, ...] = (
    Row("llama", "pp cp tp", schedule="afab", strategy="allgather", zero=1, lowering="plain", microbatches=2),
    Row("llama", "pp cp fsdp", schedule="afab", strategy="ring", remat="selective", microbatches=2),
    Row("llama", "pp dp sp", schedule="afab", zero=2, lowering="plain", microbatches=2),
    Row("llama", "pp cp tp", strategy="ring", microbatches=2),
    Row("llama", "pp fsdp ep", schedule="interleaved", remat="full", microbatches=2),
    Row("llama", "pp cp tp", schedule="interleaved", zero=0, lowering="plain", microbatches=2),
    Row("llama", "pp cp fsdp", schedule="zb_uniform", strategy="ulysses", zero=0, microbatches=2),
    Row("llama", "pp fsdp sp", schedule="zb_uniform", zero=0, lowering="plain", microbatches=2),
    Row("llama", "pp cp ep", schedule="zb_uniform", zero=1, remat="selective", microbatches=2),
    Row("llama", "pp cp dp", schedule="zb_h1", strategy="ring", zero=0, lowering="plain", microbatches=2),
    Row("llama", "pp cp sp", schedule="zb_h1", strategy="ulysses", zero=1, microbatches=2),
    Row("llama", "pp cp sp", schedule="zb_v", strategy="allgather", zero=1, microbatches=2),
    Row("llama", "pp cp ep", schedule="zb_v", strategy="ulysses", zero=2, lowering="plain", microbatches=2),
    Row("llama", "pp ep tp", schedule="zb_v", remat="selective", microbatches=2),
    Row("llama", "pp cp sp", schedule="dualpipe_v", strategy="ulysses", zero=0, lowering="plain"),
    Row("llama", "pp ep tp", schedule="dualpipe_v", zero=2),
    Row("llama", "pp cp dp", schedule="dualpipe_v", remat="dots", lowering="plain"),
    Row("sinks", "dp fsdp cp", strategy="ring", microbatches=1),
)  # fmt: skip
"""More rows of `make test-all`: schedules with the strategies, ZeRO stages and axes that `ROWS` leaves out.

Each schedule with each strategy alone takes 28 rows, of 10 to 20 seconds of CPU each.
"""

TESTED = (*ROWS, SEVEN_AXES)


def values(cfg: Config) -> Iterator[str]:
    """Yield each value, a key of `CHANGES`, that a checked configuration has."""
    model, train = cfg.model, cfg.train
    yield from (axis for axis, size in cfg.mesh.sizes.items() if size > 1)
    yield cfg.pp.schedule if cfg.mesh.pp > 1 else "no pipeline"
    if cfg.mesh.cp > 1:
        yield cfg.cp.strategy
    yield f"ZeRO {train.zero}"
    others = {
        "dense layers": model.dense_layers > 0,
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
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
    **{f"ZeRO {stage}": {"train": {"zero": stage}} for stage in range(4)},
    "dense layers": {},
    "experts": {"model": {"experts": EXPERTS}},
    "latent attention": {"model": LATENT},
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
    found: dict[Pair, list[Row]] = {pair: [] for pair in legal_pairs()}
    for row in rows:
        for pair in pairs_of(row):
            found[pair].append(row)
    return found


def may_be_wide(pair: Pair) -> bool:
    """Return whether `make test-all` alone may have a pair: a schedule with a strategy, a ZeRO stage or an axis."""
    others = (*AXES, *get_args(Strategy), *(name for name in CHANGES if name.startswith("ZeRO")))
    return any(a in SCHEDULES and b in others for a, b in itertools.permutations(pair))


MARK = "<!-- The lines below are written by `python -m tests.parity.rows docs`. -->\n"


def page() -> str:
    """Return the page of the documentation: its prose as it is, and the table anew."""
    tested, rows = rows_of_pairs(TESTED), rows_of_pairs((*TESTED, *WIDE_ROWS))
    names = list(CHANGES)
    few = sum(map(bool, tested.values()))
    lines = [
        f"{len(names)} values have {len(rows)} legal pairs. {len(TESTED)} rows of `make test` have {few} of them, "
        f"{len(WIDE_ROWS)} rows more of `make test-all` have all.\n"
    ]
    lines += ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for i, name in enumerate(names):
        counts = ["-"] * (len(names) - i - 1)
        for k, other in enumerate(names[i + 1 :]):
            if pair_rows := rows.get((name, other)):
                counts[k] = str(len(tested[name, other]) or f"({len(pair_rows)})")
        lines.append(f"| {' | '.join([f'**{name}**', *[''] * (i + 1), *counts])} |")
    return DOCS.read_text().split(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    if words == ["docs"]:
        DOCS.write_text(page())
        return
    for pair, rows in rows_of_pairs((*TESTED, *WIDE_ROWS)).items():
        print(f"{' x '.join(pair)}: {', '.join(row.name for row in rows) or 'MISSING'}")


if __name__ == "__main__":
    main(sys.argv[1:])
