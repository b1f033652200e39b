"""The command line as its user meets it: what it makes of words, and what it answers to wrong ones."""

import json
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tests.runs import change
from ultrascale_jax.cli import command_line, devices, train
from ultrascale_jax.config import (
    AUTO,
    Experts,
    Keep,
    LatentAttention,
    MeshConfig,
    RopeScaling,
    Split,
    UserError,
)
from ultrascale_jax.configs.debug import config as debug
from ultrascale_jax.launch import host_memory
from ultrascale_jax.plan.auto import Host, cluster_of
from ultrascale_jax.plan.formulas.costs import HOST_SHARE


def parse(line: str):
    """Configuration and options of `ultrascale train LINE`."""
    return command_line.parse(shlex.split(line), prog="ultrascale train", options=train.Options)


def model(**fields):
    return change(debug, model=fields)


ROPE = RopeScaling(kind="yarn")
EXPERTS = Experts(top_k=3, normalize=False)
SPLIT = Split(first="full", layers=3, last=Keep(saved=("q", "k"), offloaded=("gate",)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--train.steps 7", change(debug, train={"steps": 7})),
        ("--optim.betas 0.8 0.9", change(debug, optim={"betas": (0.8, 0.9)})),
        ("--model.tied-embeddings", model(tied_embeddings=True)),
        ("--model.sliding-window 64", model(sliding_window=64)),
        # Underscores and dashes are the same.
        ("--train.global_batch 8", change(debug, train={"global_batch": 8})),
        # A part that the recipe lacks is added by one of its fields.
        ("--model.rope-scaling.kind yarn", model(rope_scaling=ROPE)),
        ("--model.experts.top-k 3 --model.experts.no-normalize", model(experts=EXPERTS)),
        # Numbers as other programs write them.
        ("--train.steps 1k", change(debug, train={"steps": 1000})),
        ("--data.seq-len 4Ki", change(debug, data={"seq_len": 4096})),
        ("--data.no-document-mask", change(debug, data={"document_mask": False})),
        # Values that are chosen later.
        ("--train.remat full:3+save:q,k+offload:gate", change(debug, train={"remat": SPLIT})),
        ("--train.remat auto", change(debug, train={"remat": "auto"})),
        ("--train.microbatches auto", change(debug, train={"microbatches": AUTO})),
    ],
)
def test_any_dotted_field_is_replaced_and_the_others_stay(line, expected):
    assert parse(f"debug {line}")[0] == expected


def test_changes_of_a_section_are_written_as_words_that_make_them():
    latent = LatentAttention(kv_rank=16, rope_dim=4, v_dim=8)
    changed = replace(debug.model, experts=EXPERTS, latent=latent, num_kv_heads=8, head_dim=12)
    words = command_line.changes("model", debug.model, changed)
    assert parse(f"debug {shlex.join(words)}")[0].model == changed


@pytest.mark.parametrize(
    ("line", "mesh"),
    [
        ("--mesh fsdp=4,tp=2", MeshConfig(fsdp=4, tp=2)),
        ("--mesh dp=-1,sp=2", MeshConfig(dp=-1, fsdp=1, sp=2)),
        ("--mesh.tp 2", MeshConfig(fsdp=-1, sp=2, tp=2)),
    ],
)
def test_mesh_replaces_the_recipes_mesh_and_a_dotted_axis_changes_it(line, mesh):
    assert parse(f"llama3_70b {line}")[0].mesh == mesh


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("--mesh fsdp=64,tp=8", 1),
        ("--mesh pp=4,fsdp=8,ep=16", 2),
        ("--mesh pp=8,fsdp=-1,ep=64", 8),
        ("--mesh pp=4,fsdp=8,ep=16 --moe.a2a-groups 4", 4),
    ],
)
def test_tokens_go_to_experts_in_parts_as_large_as_the_recipes_on_another_mesh(line, groups):
    """`deepseek_v3` has 8 parts of 8 ranks."""
    assert parse(f"deepseek_v3 {line}")[0].moe.a2a_groups == groups


def test_what_is_open_is_chosen_for_the_devices_that_jax_finds():
    told = []
    cfg, options = parse("debug --mesh auto --train.remat auto --train.microbatches auto")
    chosen = devices.on_devices(cfg, options, told.append)
    num_devices = math.prod(chosen.mesh.sizes.values())
    assert chosen == chosen.check(jax.device_count()) and num_devices == jax.device_count()
    assert chosen == replace(cfg, mesh=chosen.mesh, train=chosen.train)
    (line,) = told
    assert line.startswith(f"--mesh {chosen.mesh.text} --train.remat {chosen.train.remat} ")
    assert f"the fastest that fits {num_devices} x cpu (planned as h100)" in line
    pinned, options = parse("debug")
    assert devices.on_devices(pinned, options, told.append) == pinned.check(num_devices)
    assert told == [line]


def test_a_cpu_may_take_what_fits_no_gpu():
    told = []
    cfg, options = parse("llama3_70b --train.remat full --train.microbatches auto")
    chosen = devices.on_devices(cfg, options, told.append)
    assert chosen.train.microbatches == 128 and "nothing fits" in told[0]
    cluster = cluster_of("cpu", jax.device_count())
    with pytest.raises(UserError, match=r"^train.microbatches='auto': nothing fits"):
        devices.checked(cfg, options, cluster, told.append)


def test_the_host_of_a_job_is_the_least_of_its_processes_and_of_what_copies_take():
    told = []
    usual = devices.host_of_all(told.append, None)
    assert usual == Host(usable_bytes=host_memory.gpu_bytes(os.environ, jax.device_count()))
    link = HOST_SHARE * cluster_of("cpu", 1).gpu.host_gbs
    for share, counted in ((0.8, 1), (1.0, 1), (1.3, 1), (0.4, 0.5), (6.9, 8)):
        found = devices.host_of_all(told.append, lambda share=share: lambda: share * link)
        assert found == Host(usable_bytes=usual.usable_bytes, gbs=counted * link)
    assert told == []
    found = devices.host_of_all(told.append, lambda: host_memory.prepare_copies(2**60))
    assert found == Host(usable_bytes=0)
    assert told[0].startswith("nothing is offloaded: copying to the host failed (")


def refused(capsys, line: str) -> str:
    """The one line on stderr with which the command line refuses these words."""
    with pytest.raises(SystemExit, match="2"):
        parse(line)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # A value that its field cannot have.
        ("--train.steps 0", "train.steps=0: must be at least 1\n"),
        ("--fake-devices 0", "fake_devices=0: must be from 1 to 4096\n"),
        (f"--train.seed {2**64 + 1}", "train.seed=18446744073709551617: must be at m"),
        ("--model.experts.num 0", "model.experts.num=0: must be from 1 to 10000\n"),
        ("--profile 13:10", "profile='13:10': write the first step"),
        ("--train.steps many", "Error parsing --train.steps: must be an integer, not 'many'\n"),
        (
            f"--train.steps {'9' * 5000}",
            f"Error parsing --train.steps: must be an integer, not '{'9' * 40}'",
        ),
        ("--optim.betas 0.9 x", "Error parsing --optim.betas: must be (float, float), not ['0.9'"),
        # Values that do not fit together.
        ("--print-config --fake-devices 8 --mesh tp=3", "mesh='tp=3': the sizes"),
        (
            "moe_debug --print-config --fake-devices 6 --mesh ep=3,dp=2",
            "mesh.ep=3: must divide model.experts.num=8\n",
        ),
        # A mesh, or a recipe.
        ("--mesh fsdp:4", "mesh='fsdp:4': write axes as fsdp=4,tp=2\n"),
        ("--mesh xp=4", "mesh='xp=4': 'xp' is no axis; the axes are pp, dp"),
        ("--mesh auto --mesh.sp 2", "mesh='auto': chooses every axis; leave out"),
        ("lama3_8b", "recipe='lama3_8b': did you mean llama3_8b?"),
        ("configs.nothing", "recipe='configs.nothing': there is no module"),
        ("ultrascale_jax.config", "recipe='ultrascale_jax.config': must expose"),
    ],
)
def test_what_a_configuration_cannot_mean_is_one_line(capsys, line, said):
    assert refused(capsys, line).startswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--train.stpes 7", "--train.stpes, 7; did you mean --train.steps?"),
        ("--optim.min_lr=0", "--optim.min_lr=0; did you mean --optim.min-lr-ratio?"),
        ("--no-document-mask", "did you mean --data.no-document-mask?"),
        ("--train.learning-rate 1e-3", "did you mean --optim.lr?"),
        ("--tp 2", "did you mean --mesh.tp?"),
        ("--recipe debug", "--recipe, debug; the recipe comes first: ultrascale train debug"),
        ("--moe.bound=2", "--moe.bound=2; see ultrascale train --help"),
        ("--data.document-mask=maybe", "options: maybe"),
        ("--data.document-mask False", "takes no value: write --data.no-document-mask"),
        ("--print-config no", "takes no value: leave --print-config out"),
        ("debug train.global-batch=8", "did you mean --train.global-batch?"),
        (
            "--train.steps 5 run/config.json",
            "the recipe comes first: ultrascale train run/config.json",
        ),
        ("--optim.name adam", "'--optim.name'. Expected one of ('adamw', 'muon')"),
        ("--optim.betas 0.9", "'--optim.betas'. Expected 2 values"),
    ],
)
def test_an_error_is_in_the_words_of_options_and_never_means_the_opposite(capsys, line, said):
    assert said in refused(capsys, line)


RECIPE_WITH_A_HELPER = """
from __future__ import annotations
import dataclasses
import pickle
import sys
import beside_the_recipe
from ultrascale_jax.configs.debug import config as debug
assert sys.modules[__name__].dataclasses is dataclasses

@dataclasses.dataclass
class Mine:
    steps: dataclasses.InitVar[int] = beside_the_recipe.STEPS

assert pickle.loads(pickle.dumps(Mine())) == Mine()
config = dataclasses.replace(debug, train=dataclasses.replace(debug.train, steps=Mine.steps))
"""


def test_a_recipe_file_is_a_module_while_it_runs_and_imports_files_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside_the_recipe", raising=False)
    (tmp_path / "beside_the_recipe.py").write_text("STEPS = 77")
    (tmp_path / "MY.PY").write_text(RECIPE_WITH_A_HELPER)
    before = set(sys.modules)
    assert parse(str(tmp_path / "MY.PY"))[0].train.steps == 77
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"broken\.py': ZeroDivisionError: .*broken\.py:1$"):
        command_line.load_recipe(str(tmp_path / "broken.py"))
    assert not [name for name in set(sys.modules) - before if "broken" in name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.yaml", "give a file that ends in .py and sets `config`, .* --print-config"),
        ("hf:my", "write ultrascale train finetune --train.init-from hf:my"),
        ("my.txt", "give a file that ends in .py and sets `config`"),
        ("./my", r"did you mean \./my\.py\?"),
        ("run", r"did you mean run/config\.json\?"),
        ("hf.json", r"is a Hugging Face model's; write --train.init-from hf:.*"),
        ("typo.json", "stepz"),
        ("broken.json", "is not JSON"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_what_a_recipe_is(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").touch()
    Path("my.py").touch()
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    Path("hf.json").write_text('{"model_type": "llama"}')
    Path("typo.json").write_text('{"train": {"stepz": 3}}')
    Path("broken.json").write_text("{")
    with pytest.raises(UserError, match=said):
        command_line.load_recipe(name)


def printed_config(capsys, line: str) -> tuple[str, str]:
    with pytest.raises(SystemExit, match="0"):
        parse(f"{line} --print-config")
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_print_config_prints_a_file_that_is_read_as_a_recipe(capsys, tmp_path):
    line = "debug --mesh fsdp=-1,tp=2 --fake-devices 8 --train.steps 7"
    text, _ = printed_config(capsys, line)
    path = tmp_path / "my.json"
    path.write_text(text)
    changed = replace(change(debug, train={"steps": 7}), mesh=MeshConfig(fsdp=4, tp=2))
    assert parse(str(path))[0] == changed
    assert parse(f"{path} --train.steps 9")[0] == change(changed, train={"steps": 9})
    assert printed_config(capsys, str(path))[0] == text


def test_print_config_shows_what_is_chosen_for_devices_and_what_is_open_without(capsys):
    line = "llama3_8b --train.remat auto --train.microbatches auto"
    for device_words, expected in (("", (0, "auto")), (" --fake-devices 8", (64, "selective"))):
        text, err = printed_config(capsys, line + device_words)
        shown = json.loads(text)["train"]
        assert (shown["microbatches"], shown["remat"]) == expected
        assert ("of the fastest that fits" in err) == bool(device_words)
