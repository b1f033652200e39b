"""Mistakes of one who calls the library: each gets one error that names the library's own argument."""

import dataclasses
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
from tests.faults.tiny import config as TINY
from tests.paths import HF
from tests.runs import change

FOLDER = HF / "llama3"
CFG = change(TINY, mesh={"fsdp": 8}, log={"run_dir": "/nowhere/run"})
OPEN = change(CFG, train={"remat": "auto"})
OTHER = change(CFG, mesh={"fsdp": 4, "tp": 2})
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


def loader(**changes) -> us.Loader:
    settings = {"vocab_size": 512, "global_batch": 8, "seed": 0, "sources": documents()}
    return us.Loader(us.DataConfig(seq_len=8, document_mask=True), **settings | changes)


def documents():
    return us.documents_of([np.arange(512)], vocab_size=512)


FLOATS = jax.ShapeDtypeStruct((8, 32), "float32")

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
        lambda: us.make_train_step(change(CFG, mesh={"fsdp": -1})),
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
