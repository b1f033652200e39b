"""Comparisons of models with layers, terms and optimizers of their own, on a mesh and on one device."""

import functools
from typing import ClassVar

import optax

import ultrascale_jax as us
from tests.own_layers import GatedAttention, OwnModel, on
from tests.parity.comparison import compare
from tests.parity.rows import BASE
from tests.runs import change
from tests.states import some_state


class Lion(us.Transformer):
    """Lion, for everything but the embedding and the norms."""

    @staticmethod
    def make_optimizer(cfg):
        return optax.lion(us.lr_schedule(cfg), weight_decay=0.1)

    @staticmethod
    def is_trained(path):
        return path != "embed" and "norm" not in path


class OwnAttention(Lion):
    """Attention with a term, and built-in experts."""

    layers = us.Layers(attention=GatedAttention)
    layer_terms: ClassVar = {"open_gates": 2.0}


class Frozen(us.Transformer):
    """The optimizer of the configuration, for attention alone."""

    @staticmethod
    def is_trained(path):
        return path.startswith("stacks.0.attn.")


def compare_model(cls: type, mesh: str, evaluates: bool = False, **sections) -> None:
    """Compare a model of eight heads and four layers on a mesh with one device, in two micro-batches."""
    shape = {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4} | sections.pop("model", {})
    train = {"microbatches": 2} | sections.pop("train", {})
    cfg = on(change(BASE, model=shape, train=train, **sections), mesh)
    compare(cfg, evaluates, functools.partial(some_state, model=cls), seeds=(0,))


def compare_own_model(
    mesh: str, train: dict, schedule: str = "1f1b", evaluates: bool = True
) -> None:
    """Compare a model of own layers with an own head and terms."""
    compare_model(OwnModel, mesh, evaluates, train=train, pp={"schedule": schedule})


def compare_own_attention(mesh: str) -> None:
    """Compare terms of layers with and without experts, and an optimizer of its own."""
    experts = us.Experts(num=4, top_k=2, d_ff=32, dense_layers=1)
    train = {"remat": "full"}
    compare_model(
        OwnAttention, mesh, model={"experts": experts}, train=train, pp={"schedule": "afab"}
    )
