"""Sizes of models and runs, against published counts and hand-made groups."""

import dataclasses

import pytest

from tests.recipes import pinned
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    MeshConfig,
    MoEConfig,
    PipelineConfig,
    UserError,
)
from ultrascale_jax.configs import llama3_8b, llama3_70b, llama32_1b, shapes
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.schedules.text import write_csv
from ultrascale_jax.plan.workload import Run

LLAMA3_8B, LLAMA3_70B = pinned(llama3_8b.config), pinned(llama3_70b.config)
LLAMA32_1B = pinned(llama32_1b.config, "selective", 8)


def piped(**pp) -> Config:
    mesh = MeshConfig(pp=4, fsdp=2)
    return dataclasses.replace(LLAMA32_1B, mesh=mesh, pp=PipelineConfig(**pp))


def split(cp: int, **fields) -> Run:
    """Llama 3 8B with a sequence of 65,536 over cp."""
    cfg = dataclasses.replace(LLAMA3_8B, mesh=MeshConfig(cp=cp), cp=ContextConfig(**fields))
    data = dataclasses.replace(cfg.data, seq_len=65536)
    return Run.of(dataclasses.replace(cfg, data=data), cp)


def test_a_run_knows_how_attention_crosses_cp():
    assert split(8).ring == (8, 1) and split(8, ulysses=2).ring == (4, 2)
    assert split(8, strategy="ulysses").ring == (1, 8) and split(1, ulysses=2).ring == (1, 1)
    labels = [split(8, **fields).label for fields in ({}, {"strategy": "ring"}, {"ulysses": 2})]
    assert [label.split(" zero")[0] for label in labels] == ["cp8", "cp8 ring", "cp8 u2"]
    assert split(8, strategy="ulysses").exchange == ["ulysses"] and split(1).exchange == []
    with pytest.raises(UserError, match=r"cp\.ulysses=3"):
        split(8, ulysses=3)


def test_a_run_knows_how_tokens_reach_their_experts():
    cfg = dataclasses.replace(LLAMA3_8B, model=shapes.MIXTRAL_8X7B, mesh=MeshConfig(ep=8))

    def label(**moe) -> str:
        return Run.of(dataclasses.replace(cfg, moe=MoEConfig(**moe)), 8).label.split(" zero")[0]

    assert label() == "ep8"
    assert label(a2a_groups=2, overlap=True) == "ep8 nodes2 overlap"
    assert Run.of(LLAMA3_8B, 8).dispatch == []
    with pytest.raises(UserError, match=r"mesh\.ep=16: must divide"):
        Run.of(dataclasses.replace(cfg, mesh=MeshConfig(ep=16)), 16)


def test_attention_computes_the_keys_of_whole_blocks():
    for fields in ({}, {"strategy": "allgather"}, {"strategy": "ulysses"}, {"ulysses": 2}):
        assert split(8, **fields).keys(None) == 65536 / 2
    natural, dealt = split(8, strategy="ring"), split(8)
    assert natural.keys(None) == (8 - 1 / 2) * 8192  # seen or not
    assert natural.keys(4096) == 4096 - 4096**2 / 16384 + 8192
    # Zigzag's late chunks meet their neighbours from the other side of the ring.
    assert dealt.keys(4096) == 4096 + 2 * 4096


def test_a_run_has_the_stages_of_the_users_table(tmp_path):
    table = tmp_path / "own.csv"
    write_csv(schedules.build("interleaved", 4, 8, 2), table)
    run = Run.of(piped(schedule=str(table)), 8)
    assert (run.schedule, run.virtual_stages) == (str(table), 2)
    other = dataclasses.replace(
        piped(schedule=str(table)), train=dataclasses.replace(piped().train, microbatches=16)
    )
    with pytest.raises(UserError, match="16"):
        Run.of(other, 8)
