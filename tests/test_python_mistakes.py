"""Mistakes of one who calls the library: each gets one error that names the library's own argument."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

HF = Path(__file__).parent / "data" / "hf" / "llama3"
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
    names = dict.fromkeys(
        ("tokens", "targets", "positions"), jax.ShapeDtypeStruct((8, 32), "int32")
    )
    return {name: value for name, value in (names | changes).items() if value is not None}


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


def attention(*shapes, axis="tokens", function=us.ring_attention) -> Callable:
    call = over((2, 4), (P("rows", "tokens"),) * 3, lambda *qkv: function(*qkv, axis=axis), *shapes)
    return call


Q, KV = (2, 16, 4, 8), (2, 16, 2, 8)
X, CHOICES, UP, DOWN = (16, 32), (16, 2), (8, 32, 64), (8, 64, 32)


def experts(*, x=X, ids=(CHOICES, jnp.int32), **settings) -> Callable:
    given = {
        "moe": us.MoEConfig(),
        "experts": us.Experts(num=8, top_k=2),
        "axis": "rows",
    } | settings

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


def cluster():
    return us.find_cluster(None, "h100", 8)


def loader(**changes) -> us.Loader:
    settings = {"vocab_size": 512, "global_batch": 8, "seed": 0, "sources": documents()}
    return us.Loader(us.DataConfig(seq_len=8, document_mask=True), **settings | changes)


def documents():
    return us.documents_of([np.arange(512)], vocab_size=512)


def h100s() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(us.target_devices(8)), ("x",))


MISTAKES: dict[str, tuple[Callable, str]] = {
    # Configurations.
    "a size as text": (
        lambda: us.ModelConfig(d_model="32"),
        r"^model\.d_model='32': must be a whole num",
    ),
    "an axis as text": (
        lambda: us.MeshConfig(fsdp="8"),
        r"^mesh\.fsdp='8': must be a whole number",
    ),
    "another trainer's word": (
        lambda: us.Config(train=us.TrainConfig(precision="bfloat16")),
        r"^train\.precision='bfloat16': must be one of bf16, fp8",
    ),
    "a weight as text": (
        lambda: us.MoEConfig(aux_weight="0.1"),
        r"^moe\.aux_weight='0\.1': must be a number",
    ),
    "a dict as section": (
        lambda: us.Config(model={"d_model": 32}),
        r"^model=\{'d_model': 32\}: must be of type ModelConfig$",
    ),
    # Meshes.
    "product": (lambda: us.make_mesh(us.MeshConfig(fsdp=3)), "multiply to 3, but there are 8 dev"),
    "a dict as mesh": (
        lambda: us.make_mesh({"fsdp": 8}),
        "^cfg: must be of type MeshConfig, not d",
    ),
    "a Config as mesh": (lambda: us.make_mesh(CFG), r"not Config; of a Config give cfg\.mesh"),
    "an open mesh": (lambda: us.abstract_mesh(us.MeshConfig()), "^mesh='fsdp=-1': is open"),
    "another mesh": (
        lambda: us.init_state(OTHER, mesh()),
        r"^mesh='fsdp=8': cfg\.mesh is fsdp=4,tp=2; make the mesh of it, make_mesh\(cfg\.mesh\)",
    ),
    "another mesh to train": (lambda: us.train(OTHER, mesh()), r"^mesh='fsdp=8': cfg\.mesh is fs"),
    "sizes for a mesh": (
        lambda: us.train(CFG, CFG.mesh),
        r"^mesh=MeshConfig\(.*: must be a mesh: ",
    ),
    "axes of one's own": (
        lambda: us.abstract_state(CFG, jax.make_mesh((8,), ("data",))),
        r"^mesh='data=8': cfg\.mesh is fsdp=8",
    ),
    # Training.
    "an open choice": (
        lambda: us.train(OPEN, mesh()),
        r"^train\.remat='auto': .*choose_auto first",
    ),
    "a step of an open choice": (
        lambda: us.make_train_step(OPEN),
        "remat='auto': .*choose_auto fi",
    ),
    "a step of an open mesh": (
        lambda: us.make_train_step(dataclasses.replace(CFG, mesh=us.MeshConfig())),
        r"^mesh\.fsdp=-1: has no size before cfg\.check\(num_devices\)",
    ),
    "a hook's class": (
        lambda: us.train(CFG, mesh(), hooks=[us.Hook]),
        r"^hooks=<class .*: must be instances of Hook, as \[MyHook\(\)\]",
    ),
    "one hook": (
        lambda: us.train(CFG, mesh(), hooks=us.Hook()),
        "^hooks: must be of type Sequence",
    ),
    "no mesh set": (
        lambda: jax.eval_shape(us.make_train_step(CFG), state(), batch()),
        r"^mesh=\(\): call the step inside `with jax\.set_mesh\(make_mesh\(cfg\.mesh\)\)`",
    ),
    "a tuple as batch": (step((IDS, IDS)), "^batch: must be of type dict, not tuple"),
    "a batch without positions": (step(batch(positions=None)), "^batch=.*: 'positions' is missing"),
    "float tokens": (
        step(batch(tokens=jax.ShapeDtypeStruct((8, 32), "float32"))),
        r"^batch\['tokens'\]='float32\[8,32\]': must be int32 \(8, 32\)",
    ),
    "targets of another length": (
        step(batch(targets=jax.ShapeDtypeStruct((8, 31), "int32"))),
        r"^batch\['targets'\]='int32\[8,31\]': must be int32 \(8, 32\), as tokens are",
    ),
    "rows of a loader": (
        lambda: us.Loader(CFG.data, vocab_size=64, global_batch=0, seed=0),
        "^global_batch=0: must be at least 1",
    ),
    "documents of a larger vocabulary": (
        lambda: loader(vocab_size=100),
        "^vocab_size=100: sources have ids below 512; give that",
    ),
    "a seed as text": (lambda: loader(seed="a"), "^seed='a': must be a whole number"),
    "a batch before the first": (lambda: loader().batch(-1), "^step=-1: must be at least 0"),
    "a start before the first step": (
        lambda: loader().device_batches(mesh(), -1),
        "^start_step=-1: must be at least 0",
    ),
    "an unknown source": (
        lambda: us.Loader(us.DataConfig(source="x"), vocab_size=64, global_batch=8, seed=0),
        r"^data\.source='x': 'x' is no source; write python-stdlib",
    ),
    # Folders.
    "no folder to load": (
        lambda: us.load_hf("/nowhere", state().params),
        "^path='/nowhere': there",
    ),
    "a state to load into": (
        lambda: us.load_hf(HF, state()),
        "^abstract: .*not TrainState; give a",
    ),
    "another model": (
        lambda: us.load_hf(HF, state().params),
        r"^embed\.shape=\(64, 32\): the conf",
    ),
    "a state to save": (
        lambda: us.save_hf(state(), CFG.model, "/nowhere/hf"),
        r"^model: .*not TrainState; of a TrainState give state\.model",
    ),
    "a Config to save": (
        lambda: us.save_hf(state().params, CFG, "/nowhere/hf"),
        r"^cfg: must be of type ModelConfig, not Config; of a Config give cfg\.model",
    ),
    "no run": (
        lambda: us.load_run("/nowhere", mesh()),
        "^run_dir='/nowhere': holds no config.json",
    ),
    "one name of a tensor": (
        lambda: us.read_hf(HF, "model.norm.weight"),
        r"^names='model\.norm\.weight': give a list of names, as \['model\.norm\.weight'\]",
    ),
    "one sharding of all tensors": (
        lambda: us.read_hf(HF, place=jax.sharding.NamedSharding(mesh(), P())),
        "^place=NamedSharding.*: must be a function of name and shape",
    ),
    "a Config to name its tensors": (
        lambda: us.hf_names(CFG),
        r"^cfg: must be of type ModelConfig, not Config; of a Config give cfg\.model",
    ),
    "a folder to name its tensors": (
        lambda: us.hf_names("folder"),
        r"^cfg: .*not str; .*of a folder read_hf_config\(folder\)",
    ),
    "no config": (lambda: us.read_hf_config("/nowhere"), "^path='/nowhere': there is no such file"),
    # Generation.
    "no mesh to generate": (
        lambda: us.generate(state().params, IDS, 2, key=None),
        r"^mesh=\(\): call generate inside `with jax\.set_mesh",
    ),
    "one row": (
        generate(prompt_BP=IDS[0]),
        r"^prompt_BP='int32\[32\]': must be token ids \[B, P\]",
    ),
    "rows": (
        generate(prompt_BP=IDS[:3]),
        r"^prompt_BP=\(3, 32\): .*mesh\.dp\*mesh\.fsdp\*mesh\.ep=8",
    ),
    "float ids": (
        generate(prompt_BP=IDS.astype(float)),
        "^prompt_BP='float64.*: must be token ids",
    ),
    "no tokens": (generate(num_tokens=0), "^num_tokens=0: must be at least 1"),
    "negative top_k": (generate(top_k=-1), "^top_k=-1: must not be negative"),
    # Attention over a split sequence.
    "attention outside": (
        lambda: us.ring_attention(*map(jnp.zeros, (Q, KV, KV)), axis="tokens"),
        r"^axis='tokens': is not manual here; call this inside jax\.shard_map",
    ),
    "attention's axis": (attention(Q, KV, KV, axis="seq"), "^axis='seq': is not manual here"),
    "three dims": (attention(Q[:3], KV[:3], KV[:3]), "want four dims"),
    "kv heads": (attention(Q, (2, 16, 3, 8), (2, 16, 3, 8)), "K a divisor of N"),
    "lengths": (attention(Q, (2, 8, 2, 8), (2, 8, 2, 8)), r"^q \(1, 4, 4, 8\), k \(1, 2, 2, 8\)"),
    "types": (attention(Q, (KV, jnp.bfloat16), KV), "^q float32, k bfloat16, v float32: want one"),
    "float documents": (
        attention(
            Q,
            KV,
            KV,
            function=lambda q, k, v, axis: us.ring_attention(
                q, k, v, axis=axis, segment_ids=jnp.ones(q.shape[:2])
            ),
        ),
        r"^segment_ids float32\[1, 4\]: want integers",
    ),
    "integers": (
        attention(*[(dims, jnp.int32) for dims in (Q, KV, KV)]),
        "want one type of floats",
    ),
    "a strategy's name": (
        attention(Q, KV, KV, function=functools.partial(us.context_attention, "ring")),
        "^context: must be of type ContextConfig, not str",
    ),
    **{
        f"attention's {name} {value}": (
            attention(Q, KV, KV, function=functools.partial(us.ring_attention, **{name: value})),
            f"^{name}={value!r}: must be ",
        )
        for name, value in (
            *(("causal", value) for value in ("no", 1)),
            *(("window", value) for value in ("7", True, 3.0)),
            *(("scale", value) for value in ("0.3", 0.0, float("inf"))),
            *(("softcap", value) for value in ("30", -1.0)),
        )
    },
    "an unknown implementation": (
        attention(Q, KV, KV, function=functools.partial(us.ring_attention, implementation="flash")),
        "^implementation='flash': must be one of auto, cudnn",
    ),
    # Experts.
    "a dispatch's name": (experts(moe="dropless"), "^moe: must be of type MoEConfig, not str"),
    "tokens of three dims": (experts(x=(16, 4, 32)), r"^x \(2, 4, 32\): want this rank's tokens"),
    "float choices": (
        experts(ids=CHOICES),
        "^ids float32, weights float32: want integers and floats",
    ),
    "more experts": (experts(experts=us.Experts(num=16, top_k=2)), "and 16 experts over 8 ranks"),
    "the experts' axis": (experts(axis="ep"), "^axis='ep': is not manual here"),
    "a function as activation": (
        experts(activation=jax.nn.relu),
        "^activation=.*must be a function of gate and up",
    ),
    "an unknown activation": (
        experts(activation="relu"),
        "^activation='relu': must be one of silu",
    ),
    # Pipelines.
    "a schedule's name": (
        pipeline(schedule="1f1b"),
        "^schedule: .*not str; build_schedule makes one",
    ),
    "ranks": (
        pipeline(schedule=us.build_schedule("1f1b", 2, 4)),
        "^schedule of 2 ranks on 4 devices",
    ),
    "micro-batches": (pipeline(microbatches=6), r"^schedule of 4 micro-batches on arrays of \[6\]"),
    "the stages' axis": (pipeline(axis="pp"), "^axis='pp': is not manual here"),
    "a layer's result": (
        pipeline(layer=lambda w, x: (x @ w)[0]),
        "^the layer must return y like its x",
    ),
    "a layer's arguments": (
        pipeline(layer=lambda w, x, c: x @ w),
        r"^layer\(w, x, c\): is called as layer\(params, x\); give the pipeline a context",
    ),
    "layers without their order": (
        pipeline(schedule=us.build_schedule("interleaved", 4, 4)),
        r"^order=None: .*layer_order\(4, 2, 'loop', num_layers\)",
    ),
    "an unknown schedule": (lambda: us.build_schedule("gpipe", 4, 8), "must be one of afab, 1f1b"),
    "ranks as text": (lambda: us.build_schedule("1f1b", "4", 8), "^ranks: must be of type int"),
    "a placement": (
        lambda: us.layer_order(4, 2, "zigzag", 16),
        "^placement='zigzag': must be one of",
    ),
    # The planner.
    "a GPU's name": (lambda: us.find_cluster(None, "h1000", 8), "^gpu='h1000': choose one of a100"),
    "a cluster's name": (
        lambda: us.estimate_step(us.Run.of(CFG, 8), "h100"),
        r"^cluster: must be of type Cluster, not str; find_cluster\(None, 'h100', num_gpus\)",
    ),
    "a Config to plan": (
        lambda: us.memory_breakdown(CFG),
        r"^run: .*not Config; Run\.of\(cfg, num_",
    ),
    "an open run": (lambda: us.Run.of(OPEN, 8), r"^train\.remat='auto': .*choose_auto first"),
    "a run on an open mesh": (
        lambda: us.Run(shape=us.Shape(), mesh=us.MeshConfig(), seq_len=8, sequences=1),
        "^mesh='fsdp=-1': has an open axis",
    ),
    "a run on a mesh that does not divide its sequences": (
        lambda: planned(us.MeshConfig(fsdp=1, cp=8), seq_len=8190),
        r"^data\.seq_len=8190: must be divisible by mesh\.cp\*mesh\.sp=8",
    ),
    "a run on a mesh that does not divide its heads": (
        lambda: planned(us.MeshConfig(fsdp=1, tp=16), us.Shape(num_heads=24, num_kv_heads=8)),
        r"^model\.num_heads=24: must be divisible by mesh\.sp\*mesh\.tp=16",
    ),
    "a run of a configuration's model": (
        lambda: planned(us.MeshConfig(fsdp=8), us.ModelConfig()),
        r"^shape: must be of type ModelShape, not ModelConfig; Shape\.of\(model\)",
    ),
    "a run with an unknown stage of ZeRO": (
        lambda: planned(us.MeshConfig(fsdp=8), zero=4),
        "^zero=4: must be one of 0, 1, 2, 3",
    ),
    "a cluster of more GPUs than the run's": (
        lambda: us.estimate_step(us.Run.of(CFG, 8), us.find_cluster(None, "h100", 64)),
        r"^cluster\.num_gpus=64: .* takes 8 GPUs; give find_cluster\(None, 'h100', 8\)",
    ),
    "a function not jitted": (
        lambda: us.compile_program(lambda x: x, mesh=mesh()),
        r"^function=.*: is no result of jax\.jit",
    ),
    "another GPU than the devices of the mesh": (
        lambda: us.compile_program(jax.jit(abs), mesh=h100s(), gpu="a100"),
        r"^gpu='a100': the devices of mesh are NVIDIA H100 80GB HBM3s; leave gpu out, or",
    ),
    "a model to search for": (
        lambda: us.search(CFG.model, cluster()),
        r"^cfg: must be of type Config, not ModelConfig; of a ModelConfig make Config\(model=",
    ),
    "a number of GPUs to search on": (
        lambda: us.search(CFG, 8),
        "^cluster: must be of type Cluster, not int; find_cluster",
    ),
    "a size as text to search": (
        lambda: us.search(CFG, cluster(), fixed={"tp": "2"}),
        r"^fixed\['tp'\]='2': must be a whole number",
    ),
    "an empty axis to search": (
        lambda: us.search(CFG, cluster(), fixed={"tp": [1, 0]}),
        r"^fixed\['tp'\]=0: must be at least 1",
    ),
    "a policy to search": (
        lambda: us.search(CFG, cluster(), fixed={"remat": "some"}),
        r"^fixed\['remat'\]='some': must be one of auto, none",
    ),
    "an unknown stash to search": (
        lambda: us.search(CFG, cluster(), fixed={"stash": ["input", "all"]}),
        r"^fixed\['stash'\]='all': must be one of residuals, input",
    ),
    "an unknown stage of ZeRO to search": (
        lambda: us.search(CFG, cluster(), fixed={"zero": 4}),
        r"^fixed\['zero'\]=4: must be from 0 to 3",
    ),
    "a cluster without GPUs": (
        lambda: us.find_cluster(None, "h100", 0),
        "^num_gpus=0: must be at least 1",
    ),
    "a number of GPUs as text": (
        lambda: us.find_cluster(None, "h100", "8"),
        "^num_gpus='8': must be a whole number",
    ),
    "a mesh that is here": (
        lambda: us.compile_program(jax.jit(lambda x: x), mesh=mesh()),
        r"^mesh='cpu': must be of target_devices\(num_devices\)",
    ),
    # Words of layers.
    "subscripts without an arrow": (
        lambda: us.reshard("BTD", IDS),
        "^subscripts='BTD': has no arro",
    ),
    "a letter of an activation": (lambda: us.act("BTY"), "^dims='Y': Y is none of the letters"),
    "the dim of a weight": (
        lambda: us.gather_sequence(IDS, "y"),
        "^dims='y': y is none of the letters",
    ),
    "a dim to reduce": (lambda: us.all_reduce(IDS, "Y"), "^dims='Y': Y is none of the letters"),
    "a dim that is not there": (
        lambda: us.mean(IDS, "D", "BT"),
        "^over='D': must be some of dims='BT'",
    ),
    "a vector of another dim": (
        lambda: us.broadcast_param(IDS[0], "D", "BT", (8, 32)),
        "^dims='D': must be some of to='BT'",
    ),
    "one axis to vary over": (
        lambda: us.vary(IDS, "ep"),
        r"^axes='ep': must be names of axes: \{'ep'\}",
    ),
    "one axis of a region": (
        lambda: us.smap(abs, in_specs=us.act("BT"), out_specs=us.act("BT"), axes="ep"),
        "^axes='ep': must be names of axes",
    ),
    "an axis that is not there": (
        inside(lambda: us.smap(abs, in_specs=us.act("BT"), out_specs=us.act("BT"), axes={"ex"})),
        "^axes={'ex'}: must be axes of the mesh: pp, dp",
    ),
    "a strategy's name as order": (
        lambda: us.sequence_order(32, 2, "zigzags"),
        "^cp.strategy='zigzags': must be one of ring, zigzag",
    ),
    "a policy to plan": (
        lambda: us.Run(shape=us.Shape(), mesh=CFG.mesh, seq_len=8, sequences=1, remat="some"),
        r"^remat='some': must be one of auto, none, selective",
    ),
    "an unknown letter": (
        lambda: us.einsum("BD,DY->BY", IDS, IDS),
        "^subscripts='BD,DY->BY': Y is",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_python_is_named_by_the_librarys_argument(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    text = str(caught.value).partition("\n---")[0]
    assert "--" not in text.replace("--input", "").replace("--out", "").replace("--tokenizer", "")
    assert len(text) < 600


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
