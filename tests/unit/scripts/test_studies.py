"""`scripts/studies.py`: the pictures of the pages have the numbers of the formulas."""

import pytest

from scripts import studies
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

WORDS = "llama3_8b --gpus 64 --mesh fsdp=8,sp=8 --train.remat {panel} --data.seq-len {x}".split()


def test_a_stack_is_as_high_as_the_breakdown_at_one_sequence():
    study = studies.Study(words=WORDS, panels=["full", "selective"], xs=["2Ki", "4Ki"])
    figure = studies.memory(study)
    assert list(figure.panels) == ["train.remat full", "train.remat selective"]
    bars = {bar.label: bar for bar in figure.panels["train.remat selective"]}
    assert list(bars) == ["2Ki", "4Ki"] and figure.x == "data.seq-len"
    words = "llama3_8b --gpus 64 --mesh fsdp=8,sp=8 --train.remat selective --data.seq-len 4096"
    words += " --train.global-batch 512 --train.microbatches 64"
    cfg, _, _ = common.parse(words.split(), "memory", common.Options, "")
    run = Run.of(cfg, 64)
    assert run.sequences == 1
    assert bars["4Ki"].total == pytest.approx(breakdown(run).peak_bytes / GIB, rel=1e-6)
