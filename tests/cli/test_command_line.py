"""The command line as its user meets it: what it makes of words, and what it answers to wrong ones."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ultrascale_jax.cli import command_line, devices, generate, prepare_data, train
from ultrascale_jax.config import (
    AUTO,
    Experts,
    LatentAttention,
    MeshConfig,
    PipelineConfig,
    RopeScaling,
    UserError,
)
from ultrascale_jax.configs.debug import config as debug
from ultrascale_jax.configs.demo import config as demo
from ultrascale_jax.launch import host_memory
from ultrascale_jax.plan.auto import Host, cluster_of
from ultrascale_jax.plan.formulas.costs import HOST_SHARE
from ultrascale_jax.web import watch

ROOT = Path(__file__).parents[2]


def parse(*words: str):
    return command_line.parse(words, prog="python -m scripts.train", options=train.Options)


def refused(capsys, *words: str) -> str:
    """The message on stderr with which the command line ends these words."""
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_no_words_are_the_demo():
    cfg, options = parse()
    assert cfg == demo
    assert options == train.Options()


def test_the_first_word_is_a_recipe_or_a_module_that_exposes_one():
    assert parse("debug")[0] == debug
    assert parse("configs.debug")[0] == debug
    assert parse("llama3-8b")[0] == parse("llama3_8b")[0]


def test_any_dotted_field_is_replaced_and_the_rest_stays():
    words = ["--train.steps", "7", "--optim.betas", "0.8", "0.9", "--model.tied-embeddings"]
    cfg, _ = parse("debug", *words, "--data.source=synthetic", "--model.sliding-window", "64")
    assert cfg == dataclasses.replace(
        debug,
        model=dataclasses.replace(debug.model, tied_embeddings=True, sliding_window=64),
        data=dataclasses.replace(debug.data, source="synthetic"),
        optim=dataclasses.replace(debug.optim, betas=(0.8, 0.9)),
        train=dataclasses.replace(debug.train, steps=7),
    )


def test_underscores_and_dashes_are_the_same():
    assert parse("debug", "--train.global_batch", "8") == parse(
        "debug", "--train.global-batch", "8"
    )
    assert parse("debug", "--log.run_dir", "out/x") == parse("debug", "--log.run-dir", "out/x")


def test_fields_of_a_part_that_the_recipe_has_are_there():
    cfg, _ = parse("llama32_1b", "--model.rope-scaling.factor", "8")
    assert cfg.model.rope_scaling is not None
    assert cfg.model.rope_scaling.factor == 8.0
    assert cfg.model.rope_scaling.thresholds == (1.0, 4.0)


@pytest.mark.parametrize(
    "words", [["--model.rope-scaling.kind", "yarn"], ["--model.rope_scaling.kind=yarn"]]
)
def test_a_rope_scaling_can_be_added_to_a_recipe_that_has_none(words):
    cfg, _ = parse("debug", *words)
    model = dataclasses.replace(debug.model, rope_scaling=RopeScaling(kind="yarn"))
    assert cfg == dataclasses.replace(debug, model=model)
    assert command_line.changes("model", debug.model, model) == [
        "--model.rope-scaling.kind",
        "yarn",
    ]


def test_experts_and_latent_attention_can_be_added_by_naming_a_field():
    words = ["--model.experts.top-k", "3", "--model.experts.no-normalize"]
    cfg, _ = parse("debug", *words)
    experts = Experts(top_k=3, normalize=False)
    assert cfg.model == dataclasses.replace(debug.model, experts=experts)
    latent = LatentAttention(kv_rank=16, rope_dim=4, v_dim=8)
    model = dataclasses.replace(
        debug.model, experts=experts, latent=latent, num_kv_heads=8, head_dim=12
    )
    words = command_line.changes("model", debug.model, model)
    assert parse("debug", *words)[0] == dataclasses.replace(debug, model=model)


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        (["--mesh", "fsdp=4,tp=2"], MeshConfig(fsdp=4, tp=2)),
        (["--mesh=tp=2"], MeshConfig(fsdp=1, tp=2)),
        (["--mesh", "dp=-1,sp=2"], MeshConfig(dp=-1, fsdp=1, sp=2)),
        (["--mesh", "tp=2", "--mesh.fsdp", "-1"], MeshConfig(fsdp=-1, tp=2)),
        (["--mesh.tp", "2"], MeshConfig(fsdp=-1, sp=2, tp=2)),
    ],
)
def test_mesh_replaces_the_recipes_mesh_and_a_dotted_axis_changes_it(words, mesh):
    assert parse("llama3_70b", *words)[0].mesh == mesh


def test_a_pipeline_is_a_mesh_axis_a_schedule_and_micro_batches():
    words = ["--mesh", "pp=4,fsdp=2", "--pp.schedule", "interleaved", "--pp.virtual", "2"]
    words += ["--train.microbatches", "16", "--train.global-batch", "32", "--pp.stash", "input"]
    cfg, _ = parse("debug", *words)
    assert cfg.mesh == MeshConfig(pp=4, fsdp=2)
    assert cfg.pp == PipelineConfig(schedule="interleaved", virtual=2, stash="input")
    assert cfg.check(8) == cfg


def test_auto_leaves_a_field_open_also_where_it_is_a_number():
    words = ["--train.remat", "auto", "--train.microbatches"]
    for cfg, _ in (parse("debug", *words, "auto"), parse("debug", *words[:2], f"{words[2]}=auto")):
        assert cfg.train == dataclasses.replace(debug.train, remat="auto", microbatches=AUTO)
    cfg, options = parse("debug", "--mesh", "auto", "--train.steps", "7")
    assert (cfg.mesh, options.mesh) == (debug.mesh, "auto")


def test_what_is_open_is_chosen_for_the_devices_that_jax_finds():
    told = []
    words = ["--mesh", "auto", "--train.remat", "auto", "--train.microbatches", "auto"]
    cfg, options = parse("debug", *words)
    chosen = devices.on_devices(cfg, options, told.append)
    num_devices = math.prod(chosen.mesh.sizes.values())
    assert chosen == chosen.check(jax.device_count()) and num_devices == jax.device_count()
    assert chosen == dataclasses.replace(cfg, mesh=chosen.mesh, train=chosen.train)
    (line,) = told
    assert line.startswith(f"--mesh {chosen.mesh.text} --train.remat {chosen.train.remat} ")
    assert f"the fastest that fits {num_devices} x cpu (planned as h100)" in line
    pinned, options = parse("debug")
    assert devices.on_devices(pinned, options, told.append) == pinned.check(num_devices)
    assert told == [line]


def test_a_cpu_may_take_what_fits_no_gpu():
    told = []
    cfg, options = parse("llama3_70b", "--train.remat", "full", "--train.microbatches", "auto")
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


def test_run_dir_fake_devices_and_profile_are_options_of_the_run():
    cfg, options = parse("--log.run-dir", "out/x", "--fake-devices", "8", "--profile", "10:13")
    assert cfg.log.run_dir == "out/x"
    assert (options.fake_devices, options.profile_steps) == (8, (10, 13))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.steps", "0"], "error: train.steps=0: must be at least 1\n"),
        (["--fake-devices", "0"], "error: fake_devices=0: must be from 1 to 4096\n"),
        (["--fake-devices", "5000"], "error: fake_devices=5000: must be from 1 to 4096\n"),
        (["--optim.lr", "1e400"], "error: optim.lr=inf: must be 0, or of a size from 1.2e-38 to 3"),
        (["--optim.lr", "1e39"], "error: optim.lr=1e+39: must be 0, or of a size from 1.2e-38 to"),
        (["--model.norm-eps", "-1e-5"], "error: model.norm_eps=-1e-05: must not be negative\n"),
        (["--train.seed", str(2**64 + 1)], "error: train.seed=18446744073709551617: must be at m"),
        (["--train.global-batch", f"1{'0' * 23}"], "error: train.global_batch=1000000000000000000"),
        (["--train.global-batch", "8388608"], "error: train.global_batch=8388608: the tokens of "),
        (["--data.seq-len", str(2**63)], "error: data.seq_len=9223372036854775808: must be at mo"),
        (["--model.rope-scaling.factor", "nan"], "error: model.rope_scaling.factor=nan: must be "),
        (
            ["--moe.bound=2"],
            "error: Unrecognized options: --moe.bound=2; see python -m scripts.train --help\n",
        ),
        (
            ["--optim.min_lr=0"],
            "error: Unrecognized options: --optim.min_lr=0; did you mean --optim.min-lr-ratio?\n",
        ),
        (["--mesh", "fsdp:4"], "error: mesh='fsdp:4': write axes as fsdp=4,tp=2\n"),
        (["--mesh", "xp=4"], "error: mesh='xp=4': 'xp' is no axis; the axes are pp, dp"),
        (["--mesh", "dp=-1,fsdp=-1"], "error: mesh.fsdp=-1: only one axis may be -1"),
        (["--profile", "13:10"], "error: profile='13:10': write the first step"),
        (["--profile", "10"], "error: profile='10': write the first step"),
        (["lama3_8b"], "error: recipe='lama3_8b': did you mean llama3_8b?"),
        (["configs.nothing"], "error: recipe='configs.nothing': there is no module"),
        (["../demo"], "error: recipe='../demo': "),
        (
            ["ultrascale_jax.config"],
            "error: recipe='ultrascale_jax.config': must expose",
        ),
        (["--mesh", "auto", "--mesh.sp", "2"], "error: mesh='auto': chooses every axis; leave out"),
        (
            ["--print-config", "--fake-devices", "8", "--mesh", "tp=3"],
            "error: mesh='tp=3': the sizes",
        ),
        (["--pp.schedule", "gpipe"], "error: pp.schedule='gpipe': must be one of afab, 1f1b, "),
        (
            ["--pp.virtual", "2"],
            "error: pp.virtual=2: 1f1b has one stage a rank; leave it out, or take interleaved\n",
        ),
        (["--model.experts.num", "0"], "error: model.experts.num=0: must be from 1 to 10000\n"),
        (["--model.latent.kv-rank", "8"], "error: model.head_dim=32: must be more than model.lat"),
        (["--moe.capacity_factor", "0.9"], "error: moe.capacity_factor=0.9: must be at least 1\n"),
        (
            ["moe_debug", "--print-config", "--fake-devices", "6", "--mesh", "ep=3,dp=2"],
            "error: mesh.ep=3: must divide model.experts.num=8\n",
        ),
        (
            ["--print-config", "--fake-devices", "16", "--mesh", "pp=16"],
            "error: model.num_layers=4: 16 stages (mesh.pp times pp.virtual) want a layer each",
        ),
    ],
)
def test_what_a_configuration_cannot_mean_is_one_line(capsys, words, message):
    err = refused(capsys, *words)
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_tilde_is_the_home_folder_in_every_option(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.py").write_text("from ultrascale_jax.configs.debug import config")
    cfg, _ = command_line.parse(["~/my.py", "--log.run-dir=~/x"], prog="train")
    assert cfg.log.run_dir == f"{tmp_path}/x"
    seen = command_line.read(watch.Options, ["~/x", "y"], prog="watch")
    assert seen.run_dirs == (tmp_path / "x", Path("y"))
    said = command_line.read(generate.Options, ["~/x", "--prompt", "~/y"], prog="generate")
    assert (said.model, said.prompt) == (f"{tmp_path}/x", "~/y")


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


@pytest.mark.parametrize("name", ["my.py", "MY.PY"])
def test_a_recipe_file_is_a_module_while_it_runs_and_imports_files_beside_it(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside_the_recipe", raising=False)
    (tmp_path / "beside_the_recipe.py").write_text("STEPS = 77")
    (tmp_path / name).write_text(RECIPE_WITH_A_HELPER)
    before = set(sys.modules)
    assert parse(str(tmp_path / name))[0].train.steps == 77
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"broken\.py': ZeroDivisionError: .*broken\.py:1$"):
        command_line.load_recipe(str(tmp_path / "broken.py"))
    assert not [name for name in set(sys.modules) - before if "broken" in name]


@pytest.mark.parametrize("name", ["a.yaml", "A.YML", "x/y.toml", "my.txt"])
def test_a_recipe_in_another_language_is_told_what_a_recipe_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").touch()
    words = "give a file that ends in .py and sets `config`, .* --print-config"
    with pytest.raises(UserError, match=rf"^recipe='{name}': {words}"):
        command_line.load_recipe(name)


def test_a_recipe_file_without_its_suffix_is_found_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").touch()
    with pytest.raises(UserError, match=r"recipe='\./my': did you mean \./my\.py\?"):
        command_line.load_recipe("./my")
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"recipe='run': did you mean run/config\.json\?"):
        command_line.load_recipe("run")


def test_an_unknown_name_gets_the_nearest_one_in_one_line(capsys):
    err = refused(capsys, "--train.stpes", "7")
    assert err.startswith(
        "error: Unrecognized options: --train.stpes, 7; did you mean --train.steps"
    )
    assert err.count("\n") == 1
    assert "--optim.weight-decay" in refused(capsys, "debug", "--optim.wieght-decay", "0")


def test_a_value_outside_a_choice_or_of_another_type_is_named_in_one_line(capsys):
    err = refused(capsys, "--optim.name", "adam")
    assert "'--optim.name'" in err and "'adamw', 'muon'" in err and err.count("\n") == 1
    err = refused(capsys, "--train.steps", "many")
    assert err == "error: Error parsing --train.steps: must be an integer, not 'many'\n"
    err = refused(capsys, "--optim.lr", "fast")
    assert err == "error: Error parsing --optim.lr: must be a number, not 'fast'\n"
    err = refused(capsys, "--optim.betas", "0.9", "x")
    assert err == "error: Error parsing --optim.betas: must be (float, float), not ['0.9', 'x']\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train.steps 1.5", "--train.steps: must be an integer, not '1.5'"),
        ("--train.steps 1kB", "--train.steps: must be an integer, not '1kB'"),
        ("--optim.lr x", "--optim.lr: must be a number, not 'x'"),
        ("--optim.betas a b", "--optim.betas: must be (float, float), not ['a', 'b']"),
        ("--fake-devices x", "--fake-devices: must be an integer, not 'x'"),
        ("--train.steps", "'--train.steps'. Expected 1 values"),
        ("--optim.betas 0.9", "'--optim.betas'. Expected 2 values"),
        (f"--train.steps {'9' * 5000}", f"must be an integer, not '{'9' * 40}'"),
        ("--no-document-mask", "did you mean --data.no-document-mask?"),
        ("--data.no-documentmask", "did you mean --data.no-document-mask?"),
        ("--moe.nooverlap", "did you mean --moe.no-overlap?"),
        ("--data.document-mask=maybe", "options: maybe"),
        ("--model.normeps 1", "did you mean --model.norm-eps?"),
        ("--kernels.nrom xla", "did you mean --kernels.norm?"),
        ("--no-train.zero", "options: --no-train.zero; see python -m scripts.train --help"),
        ("--no-print-config", "--no-print-config; see python -m scripts.train --help"),
        ("--model.nonsense 3", "--model.nonsense, 3; see python -m scripts.train --help"),
    ],
)
def test_an_error_is_in_the_words_of_options_and_never_means_the_opposite(capsys, words, said):
    err = refused(capsys, *words.split())
    assert err.endswith(f"{said}\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "section", "value"),
    [
        ("--train.steps 1k", "train.steps", 1000),
        ("--train.steps=1e3", "train.steps", 1000),
        ("--train.steps 1_000", "train.steps", 1000),
        ("--data.seq-len 4Ki", "data.seq_len", 4096),
        ("--data.seq-len 1.024k", "data.seq_len", 1024),
        ("--data.document-mask False", "data.document_mask", False),
        ("--data.document-mask=0", "data.document_mask", False),
        ("--data.document_mask off", "data.document_mask", False),
        ("--no-data.document-mask", "data.document_mask", False),
        ("--no-data.document-mask false", "data.document_mask", True),
        ("--data.no-document-mask=true", "data.document_mask", False),
        ("--moe.overlap true", "moe.overlap", True),
        ("--moe.overlap=yes --train.steps 3", "moe.overlap", True),
        ("--print-config=false --train.steps 3", "train.steps", 3),
    ],
)
def test_numbers_and_switches_are_understood_as_other_programs_write_them(words, section, value):
    cfg, options = parse("debug", *words.split())
    section, _, field = section.partition(".")
    assert getattr(getattr(cfg, section), field) == value and not options.print_config


def test_files_that_the_shell_made_of_a_pattern_are_told_the_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{number:03}.txt" for number in range(200)]
    for name in names:
        Path(name).touch()
    said = "--input got 200 files: the shell has expanded a pattern; put it in quotes"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        command_line.read(
            prepare_data.Options, ["--input", *names, "--out", "o"], prog="prepare-data"
        )


def printed_config(capsys, *words: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stop:
        parse(*words, "--print-config")
    assert stop.value.code == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_print_config_prints_a_file_that_is_read_as_a_recipe(capsys, tmp_path):
    words = ["debug", "--mesh", "fsdp=-1,tp=2", "--fake-devices", "8", "--train.steps", "7"]
    text, _ = printed_config(capsys, *words)
    shown = json.loads(text)
    assert shown["train"]["steps"] == 7 and shown["mesh"]["fsdp"] == 4
    (tmp_path / "my.json").write_text(text)
    changed = dataclasses.replace(
        debug, mesh=MeshConfig(fsdp=4, tp=2), train=dataclasses.replace(debug.train, steps=7)
    )
    assert parse(str(tmp_path / "my.json"))[0] == changed
    assert parse(str(tmp_path / "my.json"), "--train.steps", "9")[0].train.steps == 9
    assert printed_config(capsys, str(tmp_path / "my.json"))[0] == text


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    for content, said in (
        ('{"model_type": "llama"}', r"is a Hugging Face model's; write --train.init-from hf:.*"),
        ('{"train": {"stepz": 3}}', r"stepz"),
        ("{", r"my.json"),
    ):
        (tmp_path / "my.json").write_text(content)
        with pytest.raises(UserError, match=said):
            command_line.load_recipe(str(tmp_path / "my.json"))


def test_print_config_shows_what_is_chosen_for_devices_and_what_is_open_without(capsys):
    words = ["llama3_8b", "--train.remat", "auto", "--train.microbatches", "auto"]
    for more, expected in (
        ([], (0, "auto")),
        (["--fake-devices", "8"], (64, "selective")),
    ):
        text, err = printed_config(capsys, *words, *more)
        shown = json.loads(text)["train"]
        assert (shown["microbatches"], shown["remat"]) == expected
        assert ("of the fastest that fits" in err) == bool(more)


def test_help_names_the_recipes_and_every_section_and_loads_no_jax():
    code = (
        "import sys, atexit\n"
        "from ultrascale_jax.cli import train\n"
        "atexit.register(lambda: print('jax' in sys.modules))\n"
        "train.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False"
    for words in (
        "llama3_8b",
        "--mesh AXIS=SIZE",
        "--train.global-batch INT",
        "Peak learning rate",
    ):
        assert words in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            *(["--mesh", "fsdp=8"], "mesh='fsdp=8': the sizes multiply to 8, but there are 4"),
            marks=pytest.mark.wide,
        ),
        pytest.param(
            *(["--pp.schedule", "no.csv"], "pp.schedule='no.csv': there is no such file"),
            marks=pytest.mark.wide,
        ),
        (["--pp.schedule", "bad.csv"], "pp.schedule='bad.csv': row 2 (rank 1), column 1 (tick 0)"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line_before_it_starts(tmp_path, words, message):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,1B0\n")
    words = [
        "debug",
        "--fake-devices",
        "4",
        "--mesh",
        "pp=2,fsdp=2",
        "--log.run-dir",
        "run",
        *words,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.train", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    # XLA may say beforehand that there is no GPU.
    said = [
        line
        for line in done.stderr.splitlines()
        if "cudart_stub" not in line and "absl" not in line
    ]
    assert len(said) == 1 and said[0].startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()


def test_an_error_with_half_a_character_is_printed(capsys):
    with pytest.raises(SystemExit), command_line.user_errors():
        raise UserError("config.\ud800=None: is unknown")
    assert capsys.readouterr().err == "error: config.\\ud800=None: is unknown\n"


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (["--mesh", "fsdp=64,tp=8"], 1),
        (["--mesh", "pp=4,fsdp=8,ep=16"], 2),
        (["--mesh", "fsdp=4,ep=4"], 1),
        (["--mesh", "pp=8,fsdp=-1,ep=64"], 8),
        (["--mesh.ep", "32"], 4),
        (["--mesh", "pp=4,fsdp=8,ep=16", "--moe.a2a-groups", "4"], 4),
    ],
)
def test_tokens_go_to_experts_in_parts_as_large_as_the_recipes_on_another_mesh(words, groups):
    """`deepseek_v3` has 8 parts of 8 ranks."""
    cfg, _ = command_line.parse(["deepseek_v3", *words], prog="test")
    assert cfg.moe.a2a_groups == groups
