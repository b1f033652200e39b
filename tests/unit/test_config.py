"""The configuration refuses what cannot work, and its fields and recipes are what they claim."""

import dataclasses
import inspect
import math
import re
import textwrap
import typing
from ast import AnnAssign, ClassDef, Constant, Expr, parse
from itertools import pairwise

import pytest

from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.config import (
    AUTO,
    AXES,
    CheckpointConfig,
    Config,
    DataConfig,
    Distill,
    Dpo,
    Experts,
    FullAttention,
    Keep,
    LatentAttention,
    LinearAttention,
    LogConfig,
    Lora,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RopeScaling,
    Split,
    TrainConfig,
    UserError,
)
from ultrascale_jax.config.section import Section


def replaced(cfg: Config, **changes: object) -> Config:
    """`cfg` with fields given as section__field."""
    for key, value in changes.items():
        section, name = key.split("__")
        part = dataclasses.replace(getattr(cfg, section), **{name: value})
        cfg = dataclasses.replace(cfg, **{section: part})
    return cfg


def sections_of(kind, path=""):
    """Each section below `kind` by its dotted place, also one that a run may have."""
    for name, hint in typing.get_type_hints(kind).items():
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and issubclass(part, Section):
                yield f"{path}{name}", part
                yield from sections_of(part, f"{path}{name}.")


PLACES = dict(sections_of(Config))
NAMES = {section: place for place, section in PLACES.items()}


@pytest.mark.parametrize("place", PLACES)
def test_every_field_is_frozen_keyword_only_and_documented_and_errors_name_its_place(place):
    section = PLACES[place]
    body = parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ClassDef)
    documented = {
        field.target.id
        for field, doc in pairwise(body.body)
        if isinstance(field, AnnAssign)
        and isinstance(doc, Expr)
        and isinstance(doc.value, Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(section)}
    assert all(field.kw_only for field in dataclasses.fields(section))
    name = min(documented)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section(), name, None)
    with pytest.raises(UserError, match=rf"^{place}\.{name}=.*: fix$"):
        section().refuse(name, "fix")


LINEAR = {"linear": LinearAttention(), "full_attention_every": 4}
FULL = {"full_attention": FullAttention(), "sliding_window": 8, "full_attention_every": 4}
LATENT = {"head_dim": 192, "latent": LatentAttention()}
REFUSED = [
    # One of each kind of bound.
    (ModelConfig, {"num_layers": 0}),
    (ModelConfig, {"head_dim": 7}),
    (ModelConfig, {"sliding_window": 0}),
    (ModelConfig, {"norm_eps": -1e-5}),
    (DataConfig, {"eval_fraction": 0.5}),
    (OptimConfig, {"lr": math.nan}),
    (OptimConfig, {"betas": (0.9, 1.0)}),
    (MeshConfig, {"tp": 0}),
    # Fields that do not fit together; the last one is named.
    (ModelConfig, {"num_heads": 4, "num_kv_heads": 3}),
    (ModelConfig, {"full_attention_every": 6}),
    (ModelConfig, {"sliding_window": 8, "full_attention_every": 6, "first_window_layer": 1}),
    (ModelConfig, {"rope_theta_local": 1e4}),
    (ModelConfig, {"rope_dim": 7}),
    (ModelConfig, {"head_dim": 8, "rope_dim": 10}),
    (ModelConfig, LATENT | {"rope_dim": 64}),
    (ModelConfig, {"rope_scaling": RopeScaling(kind="yarn"), "rope_theta": 1.0}),
    (RopeScaling, {"truncate": False}),
    (RopeScaling, {"low_freq_factor": 4.0}),
    (RopeScaling, {"attention_factor": 1.5}),
    (RopeScaling, {"kind": "linear", "mscale_all_dim": 1.0}),
    (Experts, {"num": 4, "top_k": 5}),
    (Experts, {"num": 8, "groups": 3}),
    (Experts, {"shared_gate": True}),
    (Experts, {"groups": 4, "groups_per_token": 5}),
    (ModelConfig, {"experts": Experts(), "norm_placement": "post"}),
    (ModelConfig, LATENT | {"num_kv_heads": 2}),
    (ModelConfig, LATENT | {"qkv_bias": True}),
    (ModelConfig, LATENT | {"qk_norm": "head"}),
    (ModelConfig, LATENT | {"output_gate": True}),
    (LinearAttention, {"key_heads": 4, "value_heads": 6}),
    (ModelConfig, LINEAR | {"num_layers": 6}),
    (ModelConfig, FULL | {"num_layers": 6}),
    (ModelConfig, FULL | {"rope_dim": 4}),
    (ModelConfig, {"full_attention": FullAttention()}),
    (ModelConfig, LINEAR | {"sliding_window": 8}),
    (ModelConfig, LINEAR | {"nope_every": 2}),
    (ModelConfig, LINEAR | {"full_attention_offset": 4}),
    (ModelConfig, {"full_attention_offset": 1}),
    (DataConfig, {"eval_source": "synthetic", "eval_fraction": 0.1}),
    (OptimConfig, {"stochastic_rounding": True}),
    (OptimConfig, {"name": "muon", "moment_dtype": "bfloat16", "stochastic_rounding": True}),
    (OptimConfig, {"moment_dtype": "bfloat16", "weight_dtype": "bfloat16"}),
    (OptimConfig, {"decay_steps": 5}),
    (OptimConfig, {"name": "muon", "offload": "second"}),
    (Lora, {"rank": -1}),
    (Lora, {"rank": 8, "alpha": -1.0}),
    (Lora, {"rank": 8, "targets": ("qproj",)}),
    (Lora, {"alpha": 16.0}),
    (Dpo, {"beta": -1.0}),
    (Dpo, {"beta": 1.0, "label_smoothing": 0.5}),
    (Dpo, {"beta": 1.0, "loss": "ipo", "label_smoothing": 0.1}),
    (Dpo, {"beta": 1.0, "loss": ""}),
    (Dpo, {"beta": 1.0, "reference": "x"}),
    (Dpo, {"loss": "ipo"}),
    (Distill, {"temperature": 2.0}),
    (Distill, {"teacher": "hf:x", "top_k": 5}),
    (TrainConfig, {"remat": "some"}),
    (PipelineConfig, {"schedule": "gpipe"}),
    (PipelineConfig, {"virtual": 2}),
    (PipelineConfig, {"schedule": "interleaved", "virtual": 1}),
    (PipelineConfig, {"schedule": "zb_v", "virtual": 3}),
    (LogConfig, {"run_dir": " "}),
    *(
        (TrainConfig, {"batch_ramp": ramp})
        for ramp in (((4, 16),), ((4, 8), (9, 4)), ((4, 8),) * 2)
    ),
    *((TrainConfig, {"batch_ramp": ramp}) for ramp in (((4, 0),), ((0, 8),), "8; 4: 16")),
]


@pytest.mark.parametrize(("section", "fields"), REFUSED)
def test_a_section_refuses_what_it_cannot_mean_by_field_value_and_fix(section, fields):
    name, value = list(fields.items())[-1]
    said = re.escape(f"{NAMES[section]}.{name}={value!r}: ")
    with pytest.raises(UserError, match=f"^{said}.{{8}}"):
        section(**fields)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ModelConfig(num_layers=2, experts=Experts(dense_layers=2)), "dense_layers=2"),
        (lambda: ModelConfig(latent=LatentAttention(v_dim=8)), "model.head_dim=64"),
        (lambda: ModelConfig(**LINEAR, experts=Experts(dense_layers=1)), "experts.dense_layers=1"),
        (lambda: ModelConfig(head_dim=96, latent=LatentAttention()), "model.latent.v_dim=128"),
        (lambda: MeshConfig(dp=-1), "mesh.fsdp=-1"),
        (lambda: Keep(), "train.remat=Keep(saved=(), offloaded=())"),
        (lambda: Keep(saved=("q", "nothing")), "train.remat.saved=('q', 'nothing')"),
        (lambda: Split(first="full", layers=0, last="dots"), "train.remat.layers=0"),
        (lambda: Split(first="dots", layers=2, last="dots"), "train.remat='dots:2+dots'"),
        (lambda: Split(first="auto", layers=2, last="dots"), "train.remat='auto:2+dots'"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(make, named):
    with pytest.raises(UserError, match=rf"{re.escape(named)}: .{{8}}"):
        make()


EIGHT = Split(first="full", layers=8, last="dots")
PP4 = {"mesh__pp": 4, "pp__schedule": "interleaved", "train__microbatches": 4}
CP4 = {"mesh__cp": 4, "mesh__fsdp": 2}
PACKED = {"kernels__attention": "cudnn_packed", "train__precision": "bf16"}
SMALL_LATENT = LatentAttention(q_rank=16, kv_rank=16, rope_dim=4, v_dim=8)
BIASED = {"model__experts": Experts(num=4, biases=True)}
FOLDING = {"moe__folding": True}
HEADS_12 = {"model__num_heads": 12, "model__num_kv_heads": 4, "mesh__fsdp": 1}
HEADS_12 |= {"model__d_model": 48, "model__d_ff": 48, "model__vocab_size": 252, "data__seq_len": 96}
PAIRS = {"train__dpo": Dpo(beta=0.1)}


def taught_by(**changes) -> dict:
    """The recipe's model as a teacher, changed."""
    teacher = dataclasses.replace(load_recipe("debug").model, **changes)
    return {"train__distill": Distill(teacher="hf:x", model=teacher)}


MIXED_WINDOWS = {"model__sliding_window": 8, "model__first_window_layer": 2}


def bad_numbers(values, path=()):
    """Each number in a dataclass and its parts: where it is, and a value in its place that no device can hold."""
    for field in dataclasses.fields(values):
        value, here = getattr(values, field.name), (*path, field.name)
        if dataclasses.is_dataclass(value):
            yield from bad_numbers(value, here)
        elif isinstance(value, tuple) and value:
            yield here, (math.inf, *value[1:])
        elif isinstance(value, float):
            yield from ((here, bad) for bad in (math.inf, -math.inf, math.nan, 1e39, 1e-40))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield from ((here, bad) for bad in (2**31, -(2**31), 10**1000))


def with_value(values, path, value):
    name, *rest = path
    inner = with_value(getattr(values, name), rest, value) if rest else value
    return dataclasses.replace(values, **{name: inner})


def test_a_tilde_is_the_home_folder_in_every_field_that_holds_a_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me [1]")
    sections = {
        LogConfig: {"run_dir": "~/x"},
        TrainConfig: {"init_from": "hf:~/x"},
        CheckpointConfig: {"branch_from": "~/x@7"},
        PipelineConfig: {"schedule": "~/table.CSV"},
        DataConfig: {
            "source": "tokens:~/a@0.5,text:~/b/*.txt; 0.5: tokens:~/c",
            "tokenizer": "~/tokenizer.json",
            "eval_source": "web=text:~/d,code=tokens:~/e",
        },
    }
    for section, paths in sections.items():
        made = section(**paths)
        for field, path in paths.items():
            assert getattr(made, field) == path.replace("~", "/home/me [1]")
    assert TrainConfig(init_from="~/run@3").init_from == "/home/me [1]/run@3"
    for kept in ("a~", "out/~/x", "text:*.txt~", "~no-such-user/x"):
        assert LogConfig(run_dir=kept).run_dir == kept


def test_no_number_of_a_run_may_be_one_that_the_devices_cannot_hold():
    """No field has to remember it, nor a field that is yet to come."""
    model = ModelConfig(
        head_dim=192,
        latent=LatentAttention(),
        experts=Experts(),
        rope_scaling=RopeScaling(kind="yarn", attention_factor=1.0),
        sliding_window=8,
    )
    cfg = Config(model=model)
    bad = list(bad_numbers(cfg))
    assert len({path for path, _ in bad}) > 60
    for path, value in bad:
        with pytest.raises(UserError, match=rf"^{path[0]}\.[\w.]+=") as refusal:
            with_value(cfg, path, value)
        assert len(str(refusal.value)) < 1200


def test_each_size_of_a_ramp_divides_into_micro_batches_for_the_mesh():
    cfg = replaced(Config(), train__microbatches=4, train__batch_ramp=((50, 4), (80, 8)))
    assert [cfg.of_batch(size).train.microbatches for size in (4, 8, 16)] == [1, 2, 4]
    assert cfg.check(4).train.batches.begins == (0, 50, 80)
    with pytest.raises(
        UserError,
        match=r"^train\.batch_ramp=.*: with 4 sequences train\.global_batch=4: must be divisible",
    ):
        replaced(cfg, train__microbatches=2).check(8)
    grouped = replaced(
        cfg, mesh__pp=2, model__num_layers=4, pp__schedule="interleaved", mesh__fsdp=2
    )
    with pytest.raises(
        UserError, match=r"with 4 sequences train\.microbatches=1: must be at least 2"
    ):
        grouped.check(4)


def test_the_tokens_of_a_step_can_be_counted_in_int32():
    rows = (2**31 - 1) // 1024
    replaced(Config(), data__seq_len=1024, train__global_batch=rows)
    with pytest.raises(UserError, match=rf"^train\.global_batch={rows + 1}: .* at most {rows}$"):
        replaced(Config(), data__seq_len=1024, train__global_batch=rows + 1)


@pytest.mark.parametrize(
    ("changes", "num_devices", "named", "fix"),
    [
        ({"mesh__fsdp": 3}, 8, "mesh='fsdp=3'", "multiply to 3, but there are 8 devices"),
        (
            {**BIASED, "kernels__grouped_matmul": "mosaic"},
            8,
            "kernels.grouped_matmul='mosaic'",
            "xla",
        ),
        ({"moe__bias_rate": 0.01}, 8, "moe.bias_rate=0.01", "model.experts.bias"),
        ({**BIASED, **FOLDING, "mesh__tp": 2}, 8, "moe.folding=True", "use mesh.sp"),
        (
            {**BIASED, **FOLDING, "mesh__ep": 2, "mesh__sp": 4},
            8,
            "mesh.ep*mesh.sp=8",
            "experts.num=4",
        ),
        ({"mesh__tp": 3}, 8, "mesh='fsdp=-1,tp=3'", "3 does not divide 8 devices"),
        ({"mesh__sp": 16}, 16, "model.num_heads=8", "mesh.sp*mesh.tp=16"),
        ({"mesh__cp": 8, "data__seq_len": 252}, 8, "data.seq_len=252", "mesh.cp*mesh.sp=8"),
        ({"mesh__sp": 8, "data__seq_len": 252}, 8, "data.seq_len=252", "mesh.cp*mesh.sp=8"),
        ({**CP4, "cp__ulysses": 3}, 8, "cp.ulysses=3", "mesh.cp=4"),
        ({**CP4, "cp__strategy": "ulysses", "cp__ulysses": 2}, 8, "cp.ulysses=2", "use 1"),
        ({"mesh__cp": 16, "cp__strategy": "ulysses"}, 16, "cp.strategy='ulysses'", "16 ranks"),
        ({**CP4, "mesh__sp": 4, "cp__ulysses": 4}, 32, "cp.ulysses=4", "the 2 query and 1 key"),
        ({**HEADS_12, "mesh__tp": 6}, 6, "model.num_kv_heads=4", "must divide mesh.sp*mesh.tp=6"),
        ({**HEADS_12, "mesh__cp": 6, "cp__ulysses": 3}, 6, "cp.ulysses=3", "4 key/value heads"),
        *(
            ({**PACKED, **change}, 8, "kernels.attention='cudnn_packed'", reason)
            for change, reason in (
                ({"data__document_mask": False}, "data.document_mask is False; use auto"),
                ({"model__sliding_window": 8}, "model.sliding_window is 8; use auto"),
                ({"train__precision": "fp32"}, "train.precision is fp32; use auto"),
            )
        ),
        ({"train__microbatches": 4}, 8, "train.global_batch=16", "set train.microbatches=2"),
        ({"mesh__tp": 2, "model__d_ff": 129}, 8, "model.d_ff=129", "mesh.sp*mesh.tp=2"),
        ({"model__d_model": 60}, 8, "model.d_model=60", "use 4 of them, and mesh.dp=2 too"),
        *(
            (
                {
                    "model__num_kv_heads": 8,
                    "model__latent": dataclasses.replace(SMALL_LATENT, **{name: 12}),
                },
                8,
                f"model.latent.{name}=12",
                "use 4 of them, and mesh.dp=2 too",
            )
            for name in ("q_rank", "kv_rank")
        ),
        ({"mesh__pp": 2, "model__num_layers": 1}, 8, "model.num_layers=1", "2 ranks"),
        ({**PP4, "model__num_layers": 3}, 8, "model.num_layers=3", "4 ranks"),
        ({**PP4, "train__microbatches": 2}, 8, "train.microbatches=2", "at least 4"),
        ({**PP4, "pp__schedule": "dualpipe_v"}, 8, "train.microbatches=4", "2*mesh.pp=8"),
        ({**PP4, **MIXED_WINDOWS}, 8, "model.first_window_layer=2", "mesh.pp=1"),
        (
            {
                **{**PP4, "mesh__cp": 2},
                "model__sliding_window": 8,
                "model__full_attention_every": 2,
            },
            8,
            "cp.strategy='zigzag'",
            "allgather",
        ),
        (
            {**PP4, "train__remat": Keep(offloaded=("gate",))},
            8,
            "train.remat=Keep(saved=(), offloaded=('gate',))",
            "mesh.pp=1",
        ),
        ({"train__remat": EIGHT}, 8, "train.remat='full:8+dots'", "the model has 8 layers"),
        ({"model__mtp_layers": 256}, 8, "model.mtp_layers=256", "less than data.seq_len"),
        *(
            ({**objective, field: value}, 8, named, fix)
            for objective in (PAIRS, taught_by())
            for field, value, named, fix in (
                ("model__mtp_layers", 1, "model.mtp_layers=1", "use 0"),
                ("train__z_loss", 0.1, "train.z_loss=0.1", "use 0"),
                ("kernels__loss", "mosaic", "kernels.loss='mosaic'", "use auto or xla"),
            )
        ),
        (
            {**PAIRS, "data__document_mask": False},
            8,
            "train.dpo.beta=0.1",
            "data.document_mask=True",
        ),
        ({**PAIRS, "train__precision": "fp8"}, 8, "train.precision='fp8'", "fp8_block"),
        ({**PAIRS, **taught_by()}, 8, "train.dpo.beta=0.1", "leave out"),
        ({**taught_by(), "mesh__pp": 2}, 8, "train.distill.teacher='hf:x'", "no pipeline runs"),
        (taught_by(vocab_size=128), 8, "train.distill.teacher='hf:x'", "vocabulary has 128 tokens"),
        (
            {**taught_by(num_heads=6, num_kv_heads=6), "mesh__tp": 4},
            8,
            "train.distill.teacher='hf:x'",
            "the teacher's model.num_heads=6: must be divisible",
        ),
        (
            {"train__distill": Distill(teacher="hf:x")},
            8,
            "train.distill.teacher='hf:x'",
            "its shape is not known",
        ),
        (
            {"train__distill": Distill(teacher="topk:x", top_k=257)},
            8,
            "train.distill.top_k=257",
            "from 1 to model.vocab_size=256",
        ),
        (
            {"train__lora": Lora(rank=4, targets=("q_a_proj",))},
            8,
            "train.lora.targets=('q_a_proj',)",
            "the model has no q_a_proj; name",
        ),
        (
            {**PP4, "train__remat": dataclasses.replace(EIGHT, layers=1)},
            8,
            "train.remat='full:1+dots'",
            "a stage has 1 layer; take a smaller number, or full for all",
        ),
    ],
)
def test_a_run_refuses_what_its_mesh_cannot_divide_before_anything_is_made(
    changes, num_devices, named, fix
):
    cfg = replaced(load_recipe("debug"), **changes)
    with pytest.raises(UserError) as refusal:
        cfg.check(num_devices)
    assert str(refusal.value).startswith(f"{named}: ")
    assert fix in str(refusal.value)


PASSES = [
    # Ulysses exchanges heads, and so has whole rows.
    *(PACKED | change for change in ({}, {**CP4, "cp__strategy": "ulysses"}, {"mesh__pp": 2})),
    *(
        {**PP4, "pp__schedule": schedule, "train__microbatches": count, "train__global_batch": 48}
        for schedule, count in (
            *(("afab", 1), ("1f1b", 3), ("interleaved", 4), ("zb_v", 2)),
            *(("dualpipe_v", 8), ("my.csv", 1)),
        )
    ),
    # Without its axis a section has no effect.
    {"pp__schedule": "interleaved", "pp__virtual": 9},
    {"cp__ulysses": 7},
    *({"mesh__fsdp": 1, f"mesh__{axis}": 8} for axis in AXES),
]


@pytest.mark.parametrize("changes", PASSES)
def test_what_a_mesh_can_divide_passes_its_check(changes):
    cfg = replaced(load_recipe("debug"), **changes)
    assert cfg.check(8) == replaced(cfg, mesh__fsdp=cfg.mesh.resolve(8).fsdp)


def test_minus_one_takes_the_devices_that_the_other_axes_leave():
    assert MeshConfig(fsdp=-1, sp=2, tp=2).resolve(16) == MeshConfig(fsdp=4, sp=2, tp=2)
    assert MeshConfig(fsdp=1, cp=-1).resolve(8).cp == 8
    assert MeshConfig().resolve(1).sizes == dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(("field", "value"), [("remat", "auto"), ("microbatches", AUTO)])
def test_a_configuration_that_is_not_chosen_yet_is_refused(field, value):
    cfg = replaced(load_recipe("debug"), **{f"train__{field}": value})
    assert cfg.train.auto == (field,)
    with pytest.raises(UserError, match=rf"^train\.{field}='auto': .*ultrascale_jax.choose_auto"):
        cfg.check(1)


def test_a_mesh_is_read_from_axis_sizes():
    assert MeshConfig.parse("fsdp=4, tp=2") == MeshConfig(fsdp=4, tp=2)
    assert MeshConfig.parse("dp=-1") == MeshConfig(dp=-1, fsdp=1)
    for text in ("", "fsdp", "fsdp=x", "fsdp=4 tp=2", "fsdp=4,", "zz=2", "tp=2,tp=2"):
        with pytest.raises(UserError, match=f"^mesh={text!r}: "):
            MeshConfig.parse(text)
