"""The table of decisions about speed: each row can be switched off alone, and says what it brings."""

import re

import pytest

from tests.runs import change
from ultrascale_jax.config import Config, Keep, MeshConfig, TrainConfig, UserError
from ultrascale_jax.config.lowering import RULES, Lowering
from ultrascale_jax.configs.mixtral_8x7b import config as MIXTRAL

RUNS = [
    (Config(mesh=MeshConfig.of(fsdp=8)), 8),
    (Config(mesh=MeshConfig.of(dp=4, fsdp=2)), 8),
    (Config(mesh=MeshConfig.of(cp=4, fsdp=2)), 8),
    (Config(mesh=MeshConfig.of(fsdp=4, sp=2), train=TrainConfig(precision="fp8")), 8),
    (Config(mesh=MeshConfig.of(fsdp=8), train=TrainConfig(remat=Keep(offloaded=("gate",)))), 8),
    (
        change(
            MIXTRAL,
            mesh=MeshConfig.of(pp=2, ep=8).sizes,
            train={"zero": 1, "microbatches": 2, "global_batch": 16, "remat": "full"},
        ),
        16,
    ),
]
"""Runs that together meet the condition of every rule, and their devices."""


def runs():
    return [cfg.check(devices) for cfg, devices in RUNS]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_changes_a_run_and_can_be_switched_off_alone(rule):
    changed = [cfg for cfg in runs() if Lowering.of(cfg) != Lowering.of(cfg, without=[rule.name])]
    assert changed
    assert re.search(r"\d|docs/", rule.evidence)


def test_a_pass_that_one_rule_switches_off_stays_on_without_it():
    cfg = change(
        Config(mesh=MeshConfig.of(fsdp=8)), train={"remat": Keep(offloaded=("gate",))}
    ).check(8)
    disabled = Lowering.of(cfg).xla_options["xla_disable_hlo_passes"]
    passes = ["collective-pipeliner-forward", "collective-pipeliner-backward"]
    assert disabled == ",".join(["rematerialization", *passes])
    fewer = Lowering.of(cfg, without=["keep_results"]).xla_options["xla_disable_hlo_passes"]
    assert fewer == ",".join(passes)


@pytest.mark.parametrize(
    ("mesh", "together"),
    [({"fsdp": 8}, True), ({"cp": 4, "fsdp": 2}, True), ({"fsdp": 4, "tp": 2}, False)],
)
def test_a_layers_parameters_are_gathered_at_once_beside_a_ring_too(mesh, together):
    options = Lowering.of(Config(mesh=MeshConfig.of(**mesh)).check(8)).xla_options
    assert ("xla_gpu_all_gather_combine_threshold_bytes" in options) == together


def test_plain_applies_no_rule():
    for cfg in runs():
        plain = change(cfg, train={"lowering": "plain"})
        assert Lowering.of(plain) == Lowering.plain() == Lowering()
        assert Lowering.of(cfg, without=[rule.name for rule in RULES]) == Lowering.plain()


def test_a_rule_that_does_not_exist_is_refused():
    cfg = runs()[0]
    with pytest.raises(
        UserError, match="without='gather_early': is no rule; the rules are gather_"
    ):
        Lowering.of(cfg, without=["gather_early"])
