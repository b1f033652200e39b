"""Recipes cut to small layers on two devices an axis, and whether the rules of lowering change their results."""

import dataclasses
import math
from pathlib import Path

from tests.pairs import write_pairs
from tests.parity.comparison import assert_close, run
from tests.parity.rows import BASE, LATENT
from tests.recipe_steps import RECIPES
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import Config, MeshConfig, ModelConfig
from ultrascale_jax.config.lowering import Lowering


def cut_model(model: ModelConfig, layers: int) -> ModelConfig:
    """Return a model with the same kinds of parts, each as small as it can be, and equal constants."""
    sizes = {name: getattr(BASE.model, name) for name in ("vocab_size", "d_model", "d_ff")}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_layers": layers}
    sizes |= {"rope_theta": 1e4, "rope_scaling": BASE.model.rope_scaling, "norm_eps": 1e-5}
    sizes |= LATENT if model.latent else {}
    smaller = {"rope_dim": 4, "sliding_window": 5, "full_attention_every": 2}
    sizes |= {name: size for name, size in smaller.items() if getattr(model, name)}
    if model.linear:
        heads = {"key_heads": 4, "value_heads": 8, "key_dim": 4, "value_dim": 6}
        sizes["linear"] = dataclasses.replace(model.linear, **heads)
    if experts := model.experts:
        few = {"num": 8, "top_k": 2, "d_ff": 8, "dense_layers": min(experts.dense_layers, 1)}
        few |= {"groups": 2, "groups_per_token": 1} if experts.groups > 1 else {}
        sizes["experts"] = dataclasses.replace(experts, **few)
    return dataclasses.replace(model, **sizes)


def cut(cfg: Config) -> Config:
    """Return a recipe's run of one step: two layers, or one for each of two stages on two ranks."""
    sizes = {axis: size if size == 1 else 2 for axis, size in cfg.mesh.sizes.items()}
    nested = cfg.moe.a2a_groups > 1  # all-to-alls on two levels, which take four ranks
    hybrid = cfg.cp.ulysses > 1 and cfg.mesh.cp > 1  # a ring of groups, which does so too
    sizes |= ({"ep": 4, "fsdp": 1} if nested else {}) | ({"cp": 4} if hybrid else {})
    stages, microbatches = min(cfg.pp.virtual, 2), min(cfg.train.microbatches, 2 * sizes["pp"])
    train = {"precision": "fp32", "steps": 1, "global_batch": 16, "microbatches": microbatches}
    return Config(
        model=cut_model(cfg.model, 2 * max(stages, 1)),
        mesh=MeshConfig(**sizes),
        pp=dataclasses.replace(cfg.pp, virtual=stages),
        cp=dataclasses.replace(cfg.cp, ulysses=min(cfg.cp.ulysses, 2)),
        moe=dataclasses.replace(cfg.moe, a2a_groups=2 if nested else 1),
        data=dataclasses.replace(BASE.data, document_mask=cfg.data.document_mask, seq_len=32),
        train=dataclasses.replace(cfg.train, eval_every=0, eval_batches=1, **train),
    )


def runs() -> dict[str, Config]:
    """Return each run of cut recipes by their names; without runs that no rule of lowering meets."""
    names: dict[Config, list[str]] = {}
    for name, recipe in RECIPES.items():
        cfg = cut(recipe)
        cfg = cfg.check(math.prod(cfg.mesh.sizes.values()))
        if Lowering.of(cfg) != Lowering.plain():
            names.setdefault(cfg, []).append(name)
    return {",".join(recipes): cfg for cfg, recipes in names.items()}


RUNS = runs()
BY_DAY = [names for names in RUNS if "llama3_8b" in names.split(",")]
"""ZeRO-3 alone; rows of parity have every other rule."""


def rules_of(cfg: Config) -> set[str]:
    """Return the fields of `Lowering` that rules set for a run."""
    plain = dataclasses.asdict(Lowering.plain())
    chosen = dataclasses.asdict(Lowering.of(cfg))
    return {name for name, value in chosen.items() if value != plain[name]}


def compare_with_plain(names: str, folder: Path) -> None:
    """Refuse a run of `RUNS` whose loss or gradients are not those that it has without any rule, to 1e-5."""
    cfg = RUNS[names]
    if cfg.train.dpo.enabled:
        cfg = change(cfg, data={"source": write_pairs(folder)})
    plain = change(cfg, train={"lowering": "plain"})
    (outcome,), (expected,) = (run(each, False, some_state, seeds=(0,)) for each in (cfg, plain))
    assert_close(outcome, expected, names)
