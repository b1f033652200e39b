"""Names of older versions: saved configurations mean what they did, and a command line is told today's name."""

import dataclasses

import pytest

from tests.test_config import leaves
from ultrascale_jax.checkpoint.run_metadata import config_from_dict, fields
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import (
    Config,
    Experts,
    Fp8Config,
    KernelsConfig,
    LatentAttention,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    PipelineConfig,
    RopeScaling,
    UserError,
    WatchConfig,
)
from ultrascale_jax.config.renamed import DROPPED, JOINED, RENAMED, upgraded

OLD = {
    "model": {
        "head_dim": 192,
        "rope_scaling": {"kind": "yarn", "low_freq_factor": 1.5, "high_freq_factor": 30.0},
        "experts": {"per_token": 3, "groups": 4, "groups_per_token": 2},
        "latent": {"interleaved": True},
        "attention": "xla",
        "rms_norm": "mosaic",
        "cross_entropy": "mosaic",
    },
    "optim": {
        "schedule": "wsd",
        "decay_steps": 9,
        "min_lr": 0.05,
        "moment_dtype": "bfloat16",
        "stochastic_rounding": True,
    },
    "train": {"loss_scale": 4.0, "loss_scale_window": 100, "max_skipped": 3},
    "fp8": {"gradients": "auto", "first_layers": 1, "last_layers": 2, "implementation": "xla"},
    "pp": {"group": 8, "divergent": True},
    "moe": {
        "aux_loss": 0.1,
        "aux_over": "sequence",
        "bound": 1.5,
        "nodes": 2,
        "implementation": "xla",
    },
    "checkpoint": {"dir": "checkpoints", "max_failures": 5},
    "watch": {"spike_sigma": 6.0, "spike_window": 64, "straggler_every": 7},
}
"""Every field that had another name, as the version before saved it."""

TODAY = Config(
    model=ModelConfig(
        head_dim=192,
        rope_scaling=RopeScaling(kind="yarn", freq_factors=(1.5, 30.0)),
        experts=Experts(top_k=3, groups=4, groups_per_token=2),
        latent=LatentAttention(),
    ),
    optim=OptimConfig(schedule="wsd:9", min_lr_ratio=0.05, moment_dtype="bfloat16_stochastic"),
    fp8=Fp8Config(bf16_layers=(1, 2)),
    pp=PipelineConfig(per_rank_control_flow=True),
    moe=MoEConfig(aux_loss=(0.1, "sequence"), capacity_factor=1.5, a2a_groups=2),
    kernels=KernelsConfig(
        attention="xla", norm="mosaic", loss="mosaic", grouped_matmul="xla", fp8_matmul="xla"
    ),
    watch=WatchConfig(spike_guard=(6.0, 64)),
)

OLD_NAMES = {*RENAMED, *DROPPED, *(old for joined in JOINED.values() for old in joined.fields)}


def test_a_configuration_of_before_means_what_it_did_and_what_has_no_effect_is_named():
    with pytest.warns(UserWarning, match="has no effect any more") as told:
        assert config_from_dict(OLD) == TODAY
    assert [str(one.message).partition("=")[0] for one in told] == [
        "train.loss_scale",
        "train.loss_scale_window",
        "train.max_skipped",
        "pp.group",
        "checkpoint.max_failures",
        "watch.straggler_every",
    ]
    saved = {name for name in fields_of(OLD) if name in OLD_NAMES}
    assert saved == OLD_NAMES


def fields_of(values, path=""):
    for name, value in values.items():
        yield f"{path}{name}"
        if isinstance(value, dict):
            yield from fields_of(value, f"{path}{name}.")


def test_a_dropped_field_that_said_what_every_run_does_now_is_not_mentioned(recwarn):
    values: dict[str, dict] = {}
    for name, dropped in DROPPED.items():
        *path, field = name.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[field] = dropped.today
    upgraded(values)
    assert not recwarn


def test_one_of_today_is_left_as_it_is():
    saved = dataclasses.asdict(TODAY)
    assert upgraded(saved) == saved


def test_a_joined_field_of_which_one_was_saved_has_the_others_default():
    cfg = config_from_dict({"fp8": {"last_layers": 2}, "watch": {"spike_sigma": 3.0}})
    assert (cfg.fp8.bf16_layers, cfg.watch.spike_guard) == ((0, 2), (3.0, 128))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"checkpoint": {"dir": "elsewhere"}}, "checkpoint.dir='elsewhere': checkpoints are in"),
        ({"fp8": {"gradients": "e5m2"}}, "fp8.gradients='e5m2': gradients are e5m2 with one"),
        ({"model": {"latent": {"interleaved": False}}}, "model.latent.interleaved=False: rotary"),
        ({"moe": {"bound": "x"}}, "config.moe.capacity_factor='x': must be "),
        ({"kernels": 3, "model": {"attention": "xla"}}, "config.kernels=3: must be a group"),
    ],
)
def test_what_no_field_of_today_can_say_is_refused_by_name(values, message):
    with pytest.raises(UserError) as refusal:
        config_from_dict(values)
    assert str(refusal.value).startswith(message)


def test_the_table_leads_from_names_of_before_to_names_of_today():
    today = {*leaves(Config)}
    assert {*RENAMED.values(), *JOINED} <= today
    assert OLD_NAMES & today == {"moe.aux_loss", "optim.moment_dtype", "optim.schedule"}
    assert {*fields(TODAY)} >= {name for name in today if name.startswith("kernels.")}


@pytest.mark.parametrize("old", sorted(OLD_NAMES - {*leaves(Config)}))
def test_an_old_option_is_one_line_that_says_what_to_write(capsys, old):
    with pytest.raises(SystemExit) as stop:
        command_line.parse(["debug", f"--{old}", "1"], prog="test")
    error = capsys.readouterr().err
    new = RENAMED.get(old) or next((n for n, j in JOINED.items() if old in j.fields), None)
    option = f"--{old.replace('_', '-')}"
    wanted = (
        f"{option}: is --{new.replace('_', '-')}" if new else f"{option}: is no option any more"
    )
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {wanted}")
