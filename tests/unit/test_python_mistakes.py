"""Mistakes of one who calls the library: each gets one error that names the library's own argument."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us
from tests.paths import HF

FOLDER = HF / "llama3"
CFG = us.Config(
    model=us.ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    mesh=us.MeshConfig(fsdp=8),
    data=us.DataConfig(source="synthetic", seq_len=32),
    train=us.TrainConfig(steps=1, global_batch=8, precision="fp32"),
    log=us.LogConfig(run_dir="/nowhere/run"),
)
OPEN = dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, remat="auto"))
OTHER = dataclasses.replace(CFG, mesh=us.MeshConfig(fsdp=4, tp=2))
IDS = np.zeros((8, 32), np.int32)


def mesh() -> jax.sharding.Mesh:
    return us.make_mesh(CFG.mesh)


def state() -> us.TrainState:
    return us.abstract_state(CFG, mesh())


def inside(function: Callable) -> Callable:
    """Call `function` inside the mesh."""

    def call():
        with jax.set_mesh(mesh()):
            return function()

    return call


def generate(**changes):
    given = {"prompt_BP": IDS, "num_tokens": 2, "key": None} | changes
    return inside(lambda: us.generate(state().params, **given))


def step(batch):
    return inside(lambda: jax.eval_shape(us.make_train_step(CFG), state(), batch))


def batch(**changes) -> dict:
    rows = jax.ShapeDtypeStruct((8, 32), "int32")
    names = dict.fromkeys(("tokens", "targets", "positions"), rows) | changes
    return {name: value for name, value in names.items() if value is not None}


def over(sizes: tuple[int, int], specs: tuple, function: Callable, *shapes) -> Callable:
    """Trace `function` on its pieces of arrays of these shapes, on a mesh of the caller's."""

    def call():
        own = jax.make_mesh(sizes, ("rows", "tokens"), axis_types=(AxisType.Explicit,) * 2)
        arrays = [
            jnp.zeros(*(shape if isinstance(shape[0], tuple) else (shape,))) for shape in shapes
        ]
        with jax.set_mesh(own):
            run = jax.shard_map(function, in_specs=specs, out_specs=P("rows"))
            jax.eval_shape(run, *jax.device_put(arrays, list(specs)))

    return call


Q, KV = (2, 16, 4, 8), (2, 16, 2, 8)


def attention(*shapes, function=us.ring_attention, **settings) -> Callable:
    settings = {"axis": "tokens"} | settings
    return over(
        (2, 4),
        (P("rows", "tokens"),) * 3,
        lambda *qkv: function(*qkv, **settings),
        *(shapes or (Q, KV, KV)),
    )


X, CHOICES, UP, DOWN = (16, 32), (16, 2), (8, 32, 64), (8, 64, 32)


def experts(*, x=X, ids=(CHOICES, jnp.int32), **settings) -> Callable:
    given = {"moe": us.MoEConfig(), "experts": us.Experts(num=8, top_k=2), "axis": "rows"}
    given |= settings

    def run(*arrays):
        return us.expert_layer(*arrays, **given)[0]

    return over((8, 1), (P("rows"),) * 6, run, x, ids, CHOICES, UP, UP, DOWN)


def pipeline(*, schedule=None, axis="rows", layer=None, microbatches=4) -> Callable:
    stages = us.Stages(
        layer=layer or (lambda w, x: x @ w),
        embed=lambda shared, x: x,
        head=lambda shared, y, x: (jax.lax.pmean(jnp.sum(y), "rows"), {}),
    )
    table = us.build_schedule("1f1b", 4, 4) if schedule is None else schedule

    def run(blocks, x):
        return us.pipeline(table, stages, blocks, jnp.zeros(()), x, axis=axis).blocks

    return over((4, 2), (P("rows"), P()), run, (8, 8, 8), (microbatches, 2, 8))


def planned(mesh: us.MeshConfig, shape: us.ModelConfig | None = None, **fields) -> us.Run:
    return us.Run(
        **{"shape": shape or us.Shape(), "mesh": mesh, "seq_len": 8, "sequences": 1, **fields}
    )


def searched(fixed: dict) -> Callable:
    return lambda: us.search(CFG, us.find_cluster(None, "h100", 8), fixed=fixed)


def loader(**changes) -> us.Loader:
    settings = {"vocab_size": 512, "global_batch": 8, "seed": 0, "sources": documents()}
    return us.Loader(us.DataConfig(seq_len=8, document_mask=True), **settings | changes)


def documents():
    return us.documents_of([np.arange(512)], vocab_size=512)


def h100s() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(us.target_devices(8)), ("x",))


REGION = {"in_specs": us.act("BT"), "out_specs": us.act("BT")}
WRONG_SETTINGS = {
    "causal": ("no", 1),
    "window": ("7", True, 3.0),
    "scale": ("0.3", 0.0, float("inf")),
    "softcap": ("30", -1.0),
    "implementation": ("flash",),
}
FLOATS, SHORT = (jax.ShapeDtypeStruct(*x) for x in (((8, 32), "float32"), ((8, 31), "int32")))

MISTAKES: list[tuple[str, Callable]] = [
    # Configurations and meshes.
    ("model.d_model='32': must be a whole num", lambda: us.ModelConfig(d_model="32")),
    ("model={'d_model': 32}: must be of type M", lambda: us.Config(model={"d_model": 32})),
    ("cfg: must be of type MeshConfig, not Config; of a Config", lambda: us.make_mesh(CFG)),
    ("mesh='fsdp=-1': is open", lambda: us.abstract_mesh(us.MeshConfig())),
    ("mesh='fsdp=8': cfg.mesh is fsdp=4,tp=2; make", lambda: us.init_state(OTHER, mesh())),
    ("mesh=MeshConfig(", lambda: us.train(CFG, CFG.mesh)),
    (
        "mesh='data=8': cfg.mesh is fsdp=8",
        lambda: us.abstract_state(CFG, jax.make_mesh((8,), ("data",))),
    ),
    # Training.
    ("train.remat='auto': ", lambda: us.train(OPEN, mesh())),
    ("train.remat='auto': ", lambda: us.Run.of(OPEN, 8)),
    (
        "mesh.fsdp=-1: has no size before cfg.check",
        lambda: us.make_train_step(dataclasses.replace(CFG, mesh=us.MeshConfig())),
    ),
    ("hooks=<class ", lambda: us.train(CFG, mesh(), hooks=[us.Hook])),
    ("hooks: must be of type Sequence", lambda: us.train(CFG, mesh(), hooks=us.Hook())),
    (
        "mesh=(): call the step inside `with jax.set_mesh",
        lambda: jax.eval_shape(us.make_train_step(CFG), state(), batch()),
    ),
    ("batch: must be of type dict, not tuple", step((IDS, IDS))),
    ("batch=", step(batch(positions=None))),
    ("batch['tokens']='float32[8,32]': must be int32", step(batch(tokens=FLOATS))),
    ("global_batch=0: must be at least 1", lambda: loader(global_batch=0)),
    ("vocab_size=100: sources have ids below 512", lambda: loader(vocab_size=100)),
    ("step=-1: must be at least 0", lambda: loader().batch(-1)),
    ("start_step=-1: must be at least 0", lambda: loader().device_batches(mesh(), -1)),
    # Folders.
    ("path='/nowhere': there is no", lambda: us.load_hf("/nowhere", state().params)),
    ("abstract: must be", lambda: us.load_hf(FOLDER, state())),
    ("embed.shape=(64, 32): the conf", lambda: us.load_hf(FOLDER, state().params)),
    ("model: must be", lambda: us.save_hf(state(), CFG.model, "/nowhere/hf")),
    ("run_dir='/nowhere': holds no config.json", lambda: us.load_run("/nowhere", mesh())),
    ("names='model.norm.weight': give a list", lambda: us.read_hf(FOLDER, "model.norm.weight")),
    ("place=P(): must be a function of name", lambda: us.read_hf(FOLDER, place=P())),
    ("cfg: must be of type ModelConfig, not Config", lambda: us.hf_names(CFG)),
    # Generation.
    (
        "mesh=(): call generate inside `with jax.set_mesh",
        lambda: us.generate(state().params, IDS, 2, key=None),
    ),
    ("prompt_BP='int32[32]': must be token ids [B, P]", generate(prompt_BP=IDS[0])),
    ("prompt_BP=(3, 32): ", generate(prompt_BP=IDS[:3])),
    ("num_tokens=0: must be at least 1", generate(num_tokens=0)),
    ("top_k=-1: must not be negative", generate(top_k=-1)),
    # Attention over a split sequence.
    (
        "axis='tokens': is not manual here; call this inside jax.shard_map",
        lambda: us.ring_attention(*map(jnp.zeros, (Q, KV, KV)), axis="tokens"),
    ),
    ("axis='seq': is not manual here", attention(axis="seq")),
    ("q (1, 4, 4), k (1, 4, 2, 8)", attention(Q[:3], KV, KV)),
    ("q (1, 4, 4, 8), k (1, 2, 2, 8)", attention(Q, (2, 8, 2, 8), (2, 8, 2, 8))),
    ("q float32, k bfloat16, v float32: want", attention(Q, (KV, jnp.bfloat16), KV)),
    (
        "segment_ids float32[1, 4]: want integers",
        attention(
            function=lambda q, k, v, axis: us.ring_attention(
                q, k, v, axis=axis, segment_ids=jnp.ones(q.shape[:2])
            )
        ),
    ),
    (
        "context: must be of type ContextConfig, not str",
        attention(function=functools.partial(us.context_attention, "ring")),
    ),
    *(
        (f"{name}={value!r}: must be ", attention(**{name: value}))
        for name, values in WRONG_SETTINGS.items()
        for value in values
    ),
    # Experts.
    ("moe: must be of type MoEConfig, not str", experts(moe="dropless")),
    ("x (2, 4, 32): want this rank's tokens", experts(x=(16, 4, 32))),
    ("ids float32, weights float32: want integers and floats", experts(ids=CHOICES)),
    ("w_gate, w_up, w_down of shapes [(1, 32, 64)", experts(experts=us.Experts(num=16, top_k=2))),
    ("axis='ep': is not manual here", experts(axis="ep")),
    ("activation=", experts(activation=jax.nn.relu)),
    # Pipelines.
    ("schedule: must be", pipeline(schedule="1f1b")),
    ("schedule of 2 ranks on 4 devices", pipeline(schedule=us.build_schedule("1f1b", 2, 4))),
    ("schedule of 4 micro-batches on arrays of [6]", pipeline(microbatches=6)),
    ("axis='pp': is not manual here", pipeline(axis="pp")),
    ("the layer must return y like its x", pipeline(layer=lambda w, x: (x @ w)[0])),
    ("layer(w, x, c): is called as layer(params, x)", pipeline(layer=lambda w, x, c: x @ w)),
    ("order=None: ", pipeline(schedule=us.build_schedule("interleaved", 4, 4))),
    ("ranks: must be of type int", lambda: us.build_schedule("1f1b", "4", 8)),
    # The planner.
    ("gpu='h1000': choose one of a100", lambda: us.find_cluster(None, "h1000", 8)),
    ("num_gpus='8': must be a whole number", lambda: us.find_cluster(None, "h100", "8")),
    ("cluster: must be of type Cluster", lambda: us.estimate_step(us.Run.of(CFG, 8), "h100")),
    (
        "cluster.num_gpus=64: ",
        lambda: us.estimate_step(us.Run.of(CFG, 8), us.find_cluster(None, "h100", 64)),
    ),
    ("run: must be of type", lambda: us.memory_breakdown(CFG)),
    ("mesh='fsdp=-1': has an open axis", lambda: planned(us.MeshConfig())),
    ("data.seq_len=8190: ", lambda: planned(us.MeshConfig(fsdp=1, cp=8), seq_len=8190)),
    (
        "model.num_heads=24: ",
        lambda: planned(us.MeshConfig(fsdp=1, tp=16), us.Shape(num_heads=24, num_kv_heads=8)),
    ),
    (
        "shape: must be of type ModelShape, not ModelConfig; Shape.of(model)",
        lambda: planned(us.MeshConfig(fsdp=8), us.ModelConfig()),
    ),
    ("zero=4: must be one of 0, 1, 2, 3", lambda: planned(us.MeshConfig(fsdp=8), zero=4)),
    ("remat='some': must be one of auto", lambda: planned(us.MeshConfig(fsdp=8), remat="some")),
    ("function=", lambda: us.compile_program(lambda x: x, mesh=mesh())),
    ("gpu='a100': the devi", lambda: us.compile_program(jax.jit(abs), mesh=h100s(), gpu="a100")),
    ("mesh='cpu': must be of target_", lambda: us.compile_program(jax.jit(abs), mesh=mesh())),
    ("cluster: must be of type Cluster, not int", lambda: us.search(CFG, 8)),
    ("fixed['tp']='2': must be a whole number", searched({"tp": "2"})),
    ("fixed['tp']=0: must be at least 1", searched({"tp": [1, 0]})),
    ("fixed['remat']='some': must be one", searched({"remat": "some"})),
    ("fixed['stash']='all': must be one", searched({"stash": ["all"]})),
    ("fixed['zero']=4: must be from 0 to 3", searched({"zero": 4})),
    # Words of layers.
    ("subscripts='BTD': has no arrow", lambda: us.reshard("BTD", IDS)),
    ("subscripts='BD,DY->BY': Y is", lambda: us.einsum("BD,DY->BY", IDS, IDS)),
    ("dims='Y': Y is none of the letters", lambda: us.act("BTY")),
    ("over='D': must be some of dims='BT'", lambda: us.mean(IDS, "D", "BT")),
    ("dims='D': must be some of to='BT'", lambda: us.broadcast_param(IDS[0], "D", "BT", (8, 32))),
    ("axes='ep': must be names of axes: {'ep'}", lambda: us.vary(IDS, "ep")),
    ("axes={'ex'}: must be axes of the mesh", inside(lambda: us.smap(abs, **REGION, axes={"ex"}))),
    ("cp.strategy='zigzags': must be one of", lambda: us.sequence_order(32, 2, "zigzags")),
]


@pytest.mark.parametrize(("said", "call"), MISTAKES, ids=[said for said, _ in MISTAKES])
def test_a_mistake_in_python_is_named_by_the_librarys_argument(said, call):
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value).partition("\n---")[0]
    assert text.startswith(said) and "--" not in text and len(text) < 600


def test_a_region_on_a_mesh_of_ones_own_is_manual_over_all_its_axes():
    own = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(own):
        run = us.smap(lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P(None))
        found = jax.jit(run)(jax.device_put(jnp.arange(8.0), P("data")))
    np.testing.assert_array_equal(found, [28.0])


def choices() -> list[tuple[str, str]]:
    """Parameters of the public functions and dataclasses that take one of a few values, but for results."""
    found = []
    for name in us.__all__:
        of = getattr(us, name)
        if inspect.isfunction(of) or (dataclasses.is_dataclass(of) and of is not us.StepPrediction):
            hints = typing.get_type_hints(of)
            hints = {p: getattr(hint, "__value__", hint) for p, hint in hints.items()}
            found += [(name, p) for p, hint in hints.items() if typing.get_origin(hint) is Literal]
    return found


@pytest.mark.parametrize(("name", "parameter"), choices())
def test_a_value_that_is_none_of_a_few_is_refused_where_it_enters(name, parameter):
    """Before anything else is looked at."""
    function = getattr(us, name)
    needed = [
        p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty
    ]
    with pytest.raises(us.UserError, match=rf"{parameter}='nonsense': must be one of "):
        function(**dict.fromkeys(needed) | {parameter: "nonsense"})


def test_every_kind_of_public_name_has_values_that_are_one_of_a_few():
    names = {name for name, _ in choices()}
    assert names >= {
        "attend",
        "all_reduce",
        "rms_norm",
        "save_hf",
        "context_attention",
    }
    assert names >= {"ModelConfig", "Experts", "MoEConfig", "ContextConfig", "TrainConfig", "Run"}
