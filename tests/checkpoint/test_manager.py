"""Checkpoints: bit-exact on any mesh, refused where they are of another run, and safe to point at any folder."""

import dataclasses
import functools
import gc
import json
import resource

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from tests.faults.tiny import MODEL
from tests.runs import bits, change, in_folder, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.layout import split
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.checkpoint.manager import Checkpoints, SaveFailed
from ultrascale_jax.checkpoint.run_metadata import check_same_run, config_from_dict, describe
from ultrascale_jax.checkpoint.step_dirs import metadata
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Experts,
    LogConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    PipelineConfig,
    RopeScaling,
    TrainConfig,
    UserError,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.state import abstract_state, init_state
from ultrascale_jax.train_step.step import train_step

BASE = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(global_batch=8, steps=8),
    optim=OptimConfig(moment_dtype="bfloat16"),
)


def with_field(cfg, name, value):
    section, field = name.split(".")
    return change(cfg, **{section: {field: value}})


@pytest.fixture(scope="module")
def state():
    return random_state(BASE, mesh_of(BASE))


def save(cfg, state, *steps):
    with Checkpoints(cfg) as checkpoints:
        for step in steps:
            checkpoints.save(state, describe(cfg, step, "data-1"), wait=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 1}, {"dp": 2, "fsdp": 2, "sp": 2}, {"fsdp": 2, "tp": 4}]
)
def test_a_state_returns_bit_for_bit_on_any_mesh(state, tmp_path, sizes):
    cfg = in_folder(BASE, tmp_path)
    save(cfg, state, 5)
    other = dataclasses.replace(cfg, mesh=MeshConfig.of(**sizes))
    mesh = mesh_of(other)
    with Checkpoints(other) as checkpoints:
        assert checkpoints.latest == 5
        loaded = checkpoints.restore(5, abstract_state(other, mesh))
    assert bits(loaded) == bits(state)
    assert jax.tree.structure(loaded) == jax.tree.structure(abstract_state(other, mesh))
    shardings = [leaf.sharding for leaf in jax.tree.leaves(abstract_state(other, mesh))]
    assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == shardings


NINE = dataclasses.replace(
    BASE, model=dataclasses.replace(MODEL, num_layers=9), optim=OptimConfig()
)
PIPELINES = {
    "alone": ({}, PipelineConfig()),
    "pp2_1f1b": ({"pp": 2, "fsdp": 2, "sp": 2}, PipelineConfig()),
    "pp4_1f1b": ({"pp": 4, "fsdp": 2}, PipelineConfig()),
    # Layers as on one device; and ranks that divide no dim of any parameter.
    "pp3_1f1b": ({"pp": 3, "tp": 2}, PipelineConfig()),
    "pp3_interleaved": ({"pp": 3}, PipelineConfig(schedule="interleaved")),
    "pp4_interleaved": ({"pp": 4, "fsdp": 2}, PipelineConfig(schedule="interleaved", virtual=2)),
    "pp2_zb_v": ({"pp": 2, "dp": 2}, PipelineConfig(schedule="zb_v")),
}


def on_pipeline(cfg, name):
    sizes, pp = PIPELINES[name]
    train = dataclasses.replace(cfg.train, microbatches=24)
    return dataclasses.replace(cfg, mesh=MeshConfig.of(**sizes), pp=pp, train=train)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "pipelines"),
    [
        # On to another pipeline the way leads through the same form.
        ("adamw", ("pp4_interleaved",)),
        pytest.param("adamw", ("pp2_zb_v", "pp4_interleaved"), marks=pytest.mark.wide),
        pytest.param("adamw", ("pp4_interleaved", "pp2_1f1b"), marks=pytest.mark.wide),
        pytest.param("muon", ("pp2_1f1b", "pp4_1f1b"), marks=pytest.mark.wide),
        pytest.param("adamw", ("pp3_1f1b", "pp3_interleaved"), marks=pytest.mark.wide),
    ],
)
def test_a_checkpoint_depends_on_neither_pipeline_nor_schedule(tmp_path, optim, pipelines):
    """From one device through the pipelines and back to one, each time by a checkpoint of its own."""
    cfg = change(in_folder(NINE, tmp_path), optim={"name": optim})
    start = state = random_state(cfg, mesh_of(cfg))
    for step, name in enumerate([*pipelines, "alone"], start=1):
        save(cfg, state, step)
        cfg = on_pipeline(cfg, name)
        abstract = abstract_state(cfg, mesh_of(cfg))
        with Checkpoints(cfg) as checkpoints:
            state = checkpoints.restore(step, abstract)
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            assert (leaf.shape, leaf.sharding) == (expected.shape, expected.sharding)
        as_alone = state.params.orders == (tuple(range(9)),)
        assert as_alone == (bits(state.params.stacks) == bits(start.params.stacks))
    assert bits(state) == bits(start)


MIXED = dataclasses.replace(
    BASE,
    model=dataclasses.replace(
        MODEL,
        num_layers=5,
        experts=Experts(
            num=8, top_k=2, d_ff=16, shared=1, dense_layers=2, scores="sigmoid", bias=True
        ),
    ),
)
"""Two layers with one feed-forward layer, three with experts."""
RANKS_OF_EXPERTS = {
    "ep4": ({"ep": 4}, PipelineConfig()),
    "ep2_fsdp2": ({"ep": 2, "fsdp": 2}, PipelineConfig()),
    "pp2_ep2": ({"pp": 2, "ep": 2}, PipelineConfig()),
    "alone": ({}, PipelineConfig()),
}


@pytest.mark.wide
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_experts_return_bit_for_bit_on_any_mesh(tmp_path, optim):
    """From one device through meshes and pipelines, whose ranks hold layers of both kinds, back to one."""
    cfg = change(in_folder(MIXED, tmp_path), optim={"name": optim})
    start = state = random_state(cfg, mesh_of(cfg))
    for step, (sizes, pp) in enumerate(RANKS_OF_EXPERTS.values(), start=1):
        save(cfg, state, step)
        mesh = MeshConfig.of(**sizes)
        train = dataclasses.replace(cfg.train, microbatches=4)
        cfg = dataclasses.replace(cfg, mesh=mesh, pp=pp, train=train)
        abstract = abstract_state(cfg, mesh_of(cfg))
        with Checkpoints(cfg) as checkpoints:
            state = checkpoints.restore(step, abstract)
        for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            assert (leaf.shape, leaf.sharding) == (expected.shape, expected.sharding)
        as_alone = "pp" not in sizes
        assert as_alone == (bits(state.params.stacks) == bits(start.params.stacks))
    assert bits(state) == bits(start)


@pytest.mark.wide
def test_a_run_with_experts_continues_as_if_it_had_not_stopped(tmp_path):
    moe = MoEConfig(capacity_factor=1.0, aux_weight=0.01, bias_rate=0.01)
    cfg = in_folder(dataclasses.replace(MIXED, mesh=MeshConfig(fsdp=1, ep=4), moe=moe), tmp_path)
    mesh, loader = mesh_of(cfg), Loader(cfg.data, vocab_size=64, global_batch=8, seed=0)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(train_step, cfg))
        sharding = NamedSharding(mesh, act("BT"))
        batches = [jax.device_put(loader.batch(i), sharding) for i in range(4)]
        state = init_state(cfg, mesh)
        for batch in batches[:2]:
            state, _ = step(state, batch)
        save(cfg, state, 2)
        with Checkpoints(cfg) as checkpoints:
            resumed = checkpoints.restore(2, abstract_state(cfg, mesh))
        for batch in batches[2:]:
            (state, metrics), (resumed, again) = step(state, batch), step(resumed, batch)
            assert bits(metrics) == bits(again)
    assert bits(state) == bits(resumed)
    assert np.any(state.params.stacks[-1].moe.bias[...])


def test_a_save_does_not_ask_jax_whether_the_job_was_told_to_stop(state, tmp_path, monkeypatch):
    """JAX takes the number of the last question for how far a process is, and Orbax's is that of a step."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    save(in_folder(BASE, tmp_path), state, 1, 2)
    assert asked == []


def test_array_names_are_attribute_paths(state):
    groups = split(state)
    assert set(groups) == {"params", "train"}
    assert set(groups["params"]["stacks"]["0"]["attn"]) == {"w_q", "w_k", "w_v", "w_o"}
    assert groups["params"]["embed"].shape == (64, 32)
    assert {"step", "skipped", "skipped_in_a_row", "opt_state"} == set(groups["train"])


def test_only_the_newest_are_kept(state, tmp_path):
    cfg = in_folder(change(BASE, checkpoint={"keep": 2}), tmp_path)
    save(cfg, state, 1, 2, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_step_that_is_already_saved_is_left_as_it_is(state, tmp_path):
    cfg = in_folder(BASE, tmp_path)
    save(cfg, state, 3)
    before = (tmp_path / "checkpoints/3/_CHECKPOINT_METADATA").read_bytes()
    save(cfg, state, 3)
    assert (tmp_path / "checkpoints/3/_CHECKPOINT_METADATA").read_bytes() == before


def test_config_data_position_and_versions_are_saved_beside_the_arrays(state, tmp_path):
    cfg = in_folder(BASE, tmp_path)
    save(cfg, state, 4)
    meta = metadata(tmp_path / "checkpoints/4")
    assert config_from_dict(meta["config"]) == cfg
    assert meta["data"] == {"step": 4, "fingerprint": "data-1", "seed": 0}
    assert meta["versions"]["jax"] == jax.__version__


def test_what_a_kill_left_unfinished_is_removed_before_the_folder_is_used(state, tmp_path):
    """A thread that removed it later could meet another process's save, or its removal, in the same folder."""
    cfg = in_folder(BASE, tmp_path)
    save(cfg, state, 4)
    left = tmp_path / "checkpoints/6.orbax-checkpoint-tmp"
    (left / "params").mkdir(parents=True)
    (left / "params/d").touch()
    with Checkpoints(cfg) as checkpoints:
        assert not left.exists()
        assert checkpoints.latest == 4
        checkpoints.save(state, describe(cfg, 6, "data-1"), wait=True)
        assert checkpoints.latest == 6
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]


# TensorStore may have more to say of a failed save to a loop that Orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_saves_that_fail_are_told_and_stop_the_run_when_three_in_a_row_do(state, tmp_path, capsys):
    cfg = in_folder(BASE, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(cfg) as checkpoints:
        # The first one compiles, and the compilation cache writes files too.
        checkpoints.save(state, describe(cfg, 0, "data-1"), wait=True)
        try:
            # No file may grow beyond this: to Orbax it looks like a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
            for step in (1, 2, 3):
                checkpoints.save(state, describe(cfg, step, "data-1"))
            with pytest.raises(SaveFailed, match="File too large"):
                checkpoints.save(state, describe(cfg, 4, "data-1"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "checkpoint of step 2 failed (2 of 3 in a row): " in capsys.readouterr().out
        checkpoints.save(state, describe(cfg, 5, "data-1"), wait=True)
        assert checkpoints.latest == 5
    gc.collect()  # the failed saves' leftovers, while this test's filter holds


def test_a_link_in_place_of_a_step_is_refused(state, tmp_path):
    save(in_folder(BASE, tmp_path / "other"), state, 7)
    cfg = in_folder(BASE, tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/7").symlink_to(tmp_path / "other/checkpoints/7")
    with pytest.raises(UserError, match="symbolic link"):
        Checkpoints(cfg)
    (tmp_path / "run/config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    with pytest.raises(UserError, match="symbolic link"):
        load_params(tmp_path / "run", mesh_of(cfg))


def test_a_link_in_place_of_their_folder_is_refused_and_nothing_behind_it_is_touched(
    state, tmp_path
):
    """A run renames and deletes in it. The run directory itself may be a link."""
    save(in_folder(BASE, tmp_path / "other"), state, 7)
    foreign = tmp_path / "other/checkpoints"
    (foreign / "7/manifest.json").write_text("damaged")
    cfg = in_folder(BASE, tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(foreign)
    (tmp_path / "run/config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    never = change(cfg, checkpoint={"resume": "never"})
    uses = [
        lambda: Checkpoints(cfg),
        lambda: Checkpoints(never),
        lambda: load_params(tmp_path / "run", mesh_of(cfg)),
    ]
    for use in uses:
        with pytest.raises(UserError, match=r"run/checkpoints is a symbolic link; .*remove it"):
            use()
    assert [path.name for path in foreign.iterdir()] == ["7"]
    (tmp_path / "link").symlink_to(tmp_path / "other")
    save(in_folder(BASE, tmp_path / "link"), state, 8)
    assert sorted(path.name for path in foreign.iterdir()) == ["7", "8"]


def test_must_resume_fails_where_there_is_nothing(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint\.resume='must'"):
        Checkpoints(in_folder(change(BASE, checkpoint={"resume": "must"}), tmp_path))


def test_never_resume_moves_earlier_checkpoints_aside(state, tmp_path):
    save(in_folder(BASE, tmp_path), state, 4)
    never = in_folder(change(BASE, checkpoint={"resume": "never"}), tmp_path)
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{number}\n")
        with Checkpoints(never) as checkpoints:
            assert checkpoints.latest is None
            checkpoints.save(state, describe(never, 4, "data-1"), wait=True)
        assert (tmp_path / f"checkpoints.{number}/4/params").is_dir()
        assert (tmp_path / f"metrics.jsonl.{number}").read_text() == f"{number}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.d_ff", 128),
        ("model.sliding_window", 8),
        ("model.rope_scaling", RopeScaling()),
        ("data.seq_len", 16),
        ("data.document_mask", False),
        ("data.eval_fraction", 0.2),
        ("train.seed", 1),
        ("train.global_batch", 16),
        ("optim.name", "muon"),
        ("optim.moment_dtype", "float32"),
    ],
)
def test_another_model_or_data_order_is_refused_by_field(name, value):
    meta = describe(BASE, 4, "data-1")
    with pytest.raises(UserError) as refused:
        check_same_run(meta, with_field(BASE, name, value), "data-1", "run/4")
    lines = str(refused.value).splitlines()
    assert "run/4" in lines[0]
    assert len(lines) == 3 and lines[1].startswith(f"  {name}: saved ") and ", now " in lines[1]


def test_other_tokens_are_refused_with_their_source():
    with pytest.raises(
        UserError,
        match=r"data.source: saved 'synthetic', now 'text:x'\n.*fingerprint data-1, now data-2",
    ):
        check_same_run(
            describe(BASE, 4, "data-1"), change(BASE, data={"source": "text:x"}), "data-2", "run/4"
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mesh.tp", 2),
        ("pp.schedule", "zb_v"),
        ("kernels.attention", "xla"),
        ("log.run_dir", "elsewhere"),
        ("checkpoint.every", 3),
    ],
)
def test_how_and_where_it_runs_may_change_in_silence(name, value):
    assert (
        check_same_run(
            describe(BASE, 4, "data-1"), with_field(BASE, name, value), "data-1", "run/4"
        )
        == []
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.zero", 1),
        ("train.remat", "full"),
        ("train.microbatches", 2),
        ("train.steps", 99),
        ("optim.lr", 0.5),
        ("data.source", "text:the/same/tokens"),
    ],
)
def test_how_it_trains_may_change_and_is_told(name, value):
    [note] = check_same_run(
        describe(BASE, 4, "data-1"), with_field(BASE, name, value), "data-1", "run/4"
    )
    assert note.startswith(f"{name}: saved ") and note.endswith(f"now {value!r}")


def test_a_field_that_is_named_may_change_and_is_told():
    meta = describe(BASE, 4, "data-1")
    cfg = change(BASE, train={"seed": 1}, data={"seq_len": 16})
    with pytest.raises(UserError) as refused:
        check_same_run(meta, cfg, "data-2", "run/4")
    words = str(refused.value).rpartition("--checkpoint.allow-change ")[2].split()
    assert words == ["data.seq_len", "train.seed", "data"]
    allowed = change(cfg, checkpoint={"allow_change": ("data.seq_len", "data")})
    with pytest.raises(
        UserError,
        match=r"run/4 is of another run:\n  train\.seed: saved 0, now 1\n[\s\S]* train\.seed data\.seq_len data$",
    ):
        check_same_run(meta, allowed, "data-2", "run/4")
    allowed = change(cfg, checkpoint={"allow_change": tuple(words)})
    notes = check_same_run(meta, allowed, "data-2", "run/4")
    assert [note.partition(":")[0] for note in notes] == ["data.seq_len", "train.seed", "data"]


def test_only_fields_can_be_allowed_to_change():
    for name, hint in (("data.seqlen", r"did you mean data\.seq_len"), ("all", "is no field")):
        cfg = change(BASE, checkpoint={"allow_change": (name,)})
        with pytest.raises(UserError, match=rf"checkpoint\.allow_change='{name}': .*{hint}"):
            cfg.check(1)


def test_other_libraries_are_told():
    meta = describe(BASE, 4, "data-1")
    meta["versions"] |= {"jax": "0.4.1", "python": "2.7"}
    notes = check_same_run(meta, BASE, "data-1", "run/4")
    assert notes[0].startswith("python: saved by 2.7, now 3.")
    assert notes[1:] == [f"jax: saved by 0.4.1, now {jax.__version__}"]


def test_params_load_without_training_on_another_mesh(state, tmp_path):
    cfg = in_folder(BASE, tmp_path)
    save(cfg, state, 2, 3)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    mesh = make_mesh(MeshConfig(fsdp=2, tp=2), jax.devices()[:4])
    loaded_cfg, params = load_params(tmp_path, mesh)
    assert bits(params) == bits(state.params)
    assert params.embed[...].sharding.mesh == mesh
    assert loaded_cfg.mesh == MeshConfig(fsdp=2, tp=2) and loaded_cfg.model == MODEL
    with pytest.raises(UserError, match=r"step=9: .* \[2, 3\]"):
        load_params(tmp_path, mesh, step=9)


# Implied by test_a_checkpoint_depends_on_neither_pipeline_nor_schedule.
@pytest.mark.wide
@pytest.mark.slow
def test_params_of_a_pipeline_load_on_another_with_consecutive_layers(tmp_path):
    cfg = in_folder(on_pipeline(NINE, "pp4_interleaved"), tmp_path)
    save(cfg, init_state(cfg, mesh_of(cfg)), 1)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    params = init_state(NINE, mesh_of(NINE)).params
    _, alone = load_params(tmp_path, mesh_of(NINE))
    assert bits(alone) == bits(params)
    on_two, halves = load_params(tmp_path, make_mesh(MeshConfig(pp=2, fsdp=1), jax.devices()[:2]))
    assert on_two.pp == PipelineConfig() and on_two.mesh.pp == 2
    assert halves.orders == ((*range(9), None),)
    for leaf, expected in zip(
        jax.tree.leaves(halves.stacks), jax.tree.leaves(params.stacks), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(leaf)[:9], expected)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_params(tmp_path, mesh_of(BASE))


def test_a_config_survives_json_with_its_nested_parts():
    cfg = Config(
        model=ModelConfig(rope_scaling=RopeScaling(factor=32.0)),
        checkpoint=CheckpointConfig(every=5),
    )
    cfg = dataclasses.replace(cfg, log=LogConfig(run_dir="x"), optim=OptimConfig(betas=(0.8, 0.9)))
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


def test_a_field_of_another_version_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"^config\.model\.num_experts=8: is unknown to this version"
    ):
        config_from_dict({"model": {"num_experts": 8}})


def test_a_misspelt_field_is_refused_with_the_right_spelling():
    with pytest.raises(UserError, match=r"^config\.optim\.min_lr=0\.1: .*mean min_lr_ratio\?"):
        config_from_dict({"optim": {"min_lr": 0.1}})


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("train", "steps", "x", "must be a whole number"),
        ("optim", "lr", "x", "must be a number"),
        ("log", "run_dir", 3, "must be a text"),
        ("optim", "betas", [0.9], "must be a tuple (in JSON a list) of a number, a number"),
        ("checkpoint", "allow_change", 3, "must be a tuple (in JSON a list), each a text"),
        ("model", "sliding_window", "x", "must be a whole number or none"),
        ("optim", "name", "sgd", "must be one of adamw, muon"),
    ],
)
def test_a_value_of_another_type_is_refused_in_plain_words(section, name, value, words):
    with pytest.raises(UserError) as refused:
        config_from_dict({section: {name: value}})
    assert str(refused.value).endswith(f": {words}")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([], "config"),
        ({"model": 3}, "config.model"),
        ({"model": {"d_model": "x"}}, "model.d_model"),
        ({"train": {"steps": None}}, "train.steps"),
        ({"mesh": []}, "config.mesh"),
    ],
)
def test_values_that_are_none_are_refused(values, name):
    with pytest.raises(UserError, match=rf"^{name}="):
        config_from_dict(values)
