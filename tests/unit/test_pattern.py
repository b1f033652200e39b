"""Patterns: layers of one or two halves, and runs of equal rows."""

import pytest

from ultrascale_jax.config import (
    Config,
    Experts,
    LinearAttention,
    MeshConfig,
    ModelConfig,
    Split,
    TrainConfig,
    UserError,
)
from ultrascale_jax.config.pattern import half_numbers, layers_of, runs
from ultrascale_jax.configs import shapes

MAMBA = LinearAttention(rule="mamba2")
PATTERNED = {"pattern": "M-MM*-", "num_layers": 4, "linear": MAMBA}


def test_a_mixer_and_the_feed_forward_layer_behind_it_are_one_layer():
    assert layers_of("M-M*-M--E") == ("M-", "M", "*-", "M-", "-", "E")
    assert half_numbers("M-M*-") == ((0, 1), (2, 2), (3, 4))


@pytest.mark.parametrize(
    ("pattern", "stacks"),
    [
        ("M-M-M-", [(0, 3, 1)]),
        ("ME*EME*E", [(0, 4, 2)]),
        ("M-M-M*-M-M-M*-", [(0, 8, 4)]),
        ("MM*-", [(0, 2, 1), (2, 3, 1)]),
        ("M-M-M-MM-M-M-M*-", [(0, 8, 4), (8, 9, 1)]),
    ],
)
def test_stacks_are_runs_of_rows_with_the_fewest_layers_to_compile(pattern, stacks):
    assert [(run.start, run.stop, run.step) for run in runs(pattern)] == stacks


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (shapes.NEMOTRON_H_8B, [(4, 6), (4, 1)]),
        (shapes.NEMOTRON_3_NANO_30B_A3B, [(5, 4), (3, 1), (1, 1), (1, 1), (4, 1)]),
    ],
)
def test_published_patterns_are_few_stacks(model, rows):
    assert [(len(layers), layers.step) for layers in model.stacks] == rows
    assert [layer for layers in model.stacks for layer in layers] == model.row_starts


def test_a_pattern_says_what_each_layer_has():
    experts = Experts(num=4)
    cfg = ModelConfig(pattern="MEM*EE", num_layers=4, linear=MAMBA, experts=experts)
    halves = [(cfg.mixers(layer), cfg.feed_forward(layer)) for layer in range(4)]
    assert halves == [
        (("mamba2",), "moe"),
        (("mamba2",), None),
        (("attention",), "moe"),
        ((), "moe"),
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pattern": "M-X"}, "pattern"),
        ({"pattern": "M-" * 501}, "pattern"),
        ({"pattern": "*-*-"}, "pattern"),
        ({"pattern": "M-ME"}, "pattern"),
        ({"pattern": "M-ME", "experts": Experts()}, "pattern"),
        ({"num_layers": 6}, "num_layers"),
        ({"full_attention_every": 2}, "full_attention_every"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"mtp_layers": 1}, "mtp_layers"),
        ({"nope_every": 2}, "nope_every"),
        ({"layer_scale": True}, "layer_scale"),
        (
            {"linear": LinearAttention(rule="mamba2", beside_attention=True)},
            "linear.beside_attention",
        ),
    ],
)
def test_a_pattern_of_other_parts_than_the_models_is_refused(changes, field):
    with pytest.raises(UserError, match=rf"^model\.{field}="):
        ModelConfig(**(PATTERNED | changes))


@pytest.mark.parametrize(
    ("mesh", "train", "named", "fix"),
    [
        ("pp=2,fsdp=4", {"microbatches": 2}, "mesh.pp=2", "use mesh.fsdp"),
        (
            "fsdp=8",
            {"remat": Split(first="full", layers=2, last="dots")},
            "train.remat='full:2+dots'",
            "take 3, 6, 7",
        ),
    ],
)
def test_stages_and_policies_have_whole_rows_that_repeat(mesh, train, named, fix):
    model = ModelConfig(pattern="M-M*-M-M*--M", num_layers=8, linear=MAMBA)
    cfg = Config(model=model, mesh=MeshConfig.parse(mesh), train=TrainConfig(**train))
    with pytest.raises(UserError) as refusal:
        cfg.check(8)
    assert str(refusal.value).startswith(f"{named}: ")
    assert fix in str(refusal.value)
