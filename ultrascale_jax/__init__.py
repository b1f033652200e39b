"""The Ultra-Scale Playbook as running software: train language models on any mesh of GPUs with JAX.

The public API is imported on first use, so `import ultrascale_jax` is quick and needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultrascale_jax.config import (
        Config,
        ContextConfig,
        Experts,
        LatentAttention,
        MeshConfig,
        ModelConfig,
        MoEConfig,
    )
    from ultrascale_jax.data.loader import Loader
    from ultrascale_jax.mesh import abstract_mesh, make_mesh
    from ultrascale_jax.models.generate import generate
    from ultrascale_jax.models.hf import load as load_hf
    from ultrascale_jax.models.hf import save as save_hf
    from ultrascale_jax.models.hf_config import read_config as read_hf_config
    from ultrascale_jax.models.transformer import Transformer
    from ultrascale_jax.parallel.context import (
        allgather_attention,
        ring_attention,
        ulysses_attention,
        zigzag_attention,
    )
    from ultrascale_jax.parallel.expert import expert_layer
    from ultrascale_jax.parallel.manual import smap
    from ultrascale_jax.parallel.order import sequence_order
    from ultrascale_jax.parallel.pipeline import Stages, pipeline
    from ultrascale_jax.parallel.schedules import build as build_schedule
    from ultrascale_jax.parallel.schedules import forward_only, layer_order, stage_layers
    from ultrascale_jax.parallel.schedules import read_csv as read_schedule
    from ultrascale_jax.plan.compile import compile_step, simulate_step
    from ultrascale_jax.plan.hardware import find_cluster
    from ultrascale_jax.plan.memory import breakdown as memory_breakdown
    from ultrascale_jax.plan.speed import estimate as estimate_step
    from ultrascale_jax.plan.workload import Run, Shape
    from ultrascale_jax.sharding import act, vary
    from ultrascale_jax.training.state import abstract_state, init_state
    from ultrascale_jax.training.step import make_train_step

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ContextConfig",
    "Experts",
    "LatentAttention",
    "Loader",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "Run",
    "Shape",
    "Stages",
    "Transformer",
    "abstract_mesh",
    "abstract_state",
    "act",
    "allgather_attention",
    "build_schedule",
    "compile_step",
    "estimate_step",
    "expert_layer",
    "find_cluster",
    "forward_only",
    "generate",
    "init_state",
    "layer_order",
    "load_hf",
    "make_mesh",
    "make_train_step",
    "memory_breakdown",
    "pipeline",
    "read_hf_config",
    "read_schedule",
    "ring_attention",
    "save_hf",
    "sequence_order",
    "simulate_step",
    "smap",
    "stage_layers",
    "ulysses_attention",
    "vary",
    "zigzag_attention",
]

_HOME = {
    "Config": "config",
    "ContextConfig": "config",
    "Experts": "config",
    "LatentAttention": "config",
    "Loader": "data.loader",
    "MeshConfig": "config",
    "MoEConfig": "config",
    "ModelConfig": "config",
    "Run": "plan.workload",
    "Shape": "plan.workload",
    "Stages": "parallel.pipeline",
    "Transformer": "models.transformer",
    "abstract_mesh": "mesh",
    "abstract_state": "training.state",
    "act": "sharding",
    "allgather_attention": "parallel.context",
    "build_schedule": "parallel.schedules:build",
    "compile_step": "plan.compile",
    "estimate_step": "plan.speed:estimate",
    "expert_layer": "parallel.expert",
    "find_cluster": "plan.hardware",
    "forward_only": "parallel.schedules",
    "generate": "models.generate",
    "init_state": "training.state",
    "layer_order": "parallel.schedules",
    "load_hf": "models.hf:load",
    "make_mesh": "mesh",
    "make_train_step": "training.step",
    "memory_breakdown": "plan.memory:breakdown",
    "pipeline": "parallel.pipeline",
    "read_hf_config": "models.hf_config:read_config",
    "read_schedule": "parallel.schedules:read_csv",
    "ring_attention": "parallel.context",
    "save_hf": "models.hf:save",
    "sequence_order": "parallel.order",
    "simulate_step": "plan.compile",
    "smap": "parallel.manual",
    "stage_layers": "parallel.schedules",
    "ulysses_attention": "parallel.context",
    "vary": "sharding",
    "zigzag_attention": "parallel.context",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
