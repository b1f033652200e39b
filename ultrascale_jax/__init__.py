"""The Ultra-Scale Playbook as running software: train language models on any mesh of GPUs with JAX.

The public API is imported on first use, so `import ultrascale_jax` is quick and needs no JAX.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultrascale_jax.checkpoint.load_params import load_params as load_run
    from ultrascale_jax.cli.lm_eval_model import LMEvalModel
    from ultrascale_jax.config import (
        CheckpointConfig,
        Config,
        ContextConfig,
        DataConfig,
        Experts,
        KernelsConfig,
        LatentAttention,
        LogConfig,
        MeshConfig,
        ModelConfig,
        MoEConfig,
        OptimConfig,
        TrainConfig,
        UserError,
    )
    from ultrascale_jax.data.loader import Loader
    from ultrascale_jax.hooks import Batch, Hook
    from ultrascale_jax.huggingface.checkpoint import load as load_hf
    from ultrascale_jax.huggingface.checkpoint import save as save_hf
    from ultrascale_jax.huggingface.config import read_config as read_hf_config
    from ultrascale_jax.models.attention import Attention, attend
    from ultrascale_jax.models.block import Layers
    from ultrascale_jax.models.fp8 import linear
    from ultrascale_jax.models.generate import generate
    from ultrascale_jax.models.inputs import LayerInputs
    from ultrascale_jax.models.layers import MLP, gather_sequence, param, rms_norm, scatter_sequence
    from ultrascale_jax.models.rotary import rotate
    from ultrascale_jax.models.transformer import Transformer
    from ultrascale_jax.parallel.context.attention import (
        allgather_attention,
        context_attention,
        ring_attention,
        ulysses_attention,
        zigzag_attention,
    )
    from ultrascale_jax.parallel.context.layout import sequence_order
    from ultrascale_jax.parallel.experts.exchange import expert_layer
    from ultrascale_jax.parallel.pipeline.executor import pipeline
    from ultrascale_jax.parallel.pipeline.orders import forward_only
    from ultrascale_jax.parallel.pipeline.schedules import build as build_schedule
    from ultrascale_jax.parallel.pipeline.schedules import layer_order, stage_layers
    from ultrascale_jax.parallel.pipeline.stages import Stages
    from ultrascale_jax.parallel.pipeline.table_csv import read_csv as read_schedule
    from ultrascale_jax.plan.auto import choose_auto
    from ultrascale_jax.plan.compiled.compile import (
        compile_program,
        compile_step,
        simulate_step,
        target_devices,
    )
    from ultrascale_jax.plan.formulas.memory import breakdown as memory_breakdown
    from ultrascale_jax.plan.formulas.step_time import estimate as estimate_step
    from ultrascale_jax.plan.hardware import find_cluster
    from ultrascale_jax.plan.workload import Run
    from ultrascale_jax.sharding.manual import smap
    from ultrascale_jax.sharding.mesh import abstract_mesh, make_mesh
    from ultrascale_jax.sharding.primitives import (
        all_reduce,
        broadcast_param,
        einsum,
        mean,
        reshard,
    )
    from ultrascale_jax.sharding.rules import act, vary
    from ultrascale_jax.train_step.state import TrainState, abstract_state, init_state
    from ultrascale_jax.train_step.step import make_train_step
    from ultrascale_jax.training.loop import train
    from ultrascale_jax.training.model_shape import ModelShape as Shape

__version__ = "0.1.0"

__all__ = [
    "MLP",
    "Attention",
    "Batch",
    "CheckpointConfig",
    "Config",
    "ContextConfig",
    "DataConfig",
    "Experts",
    "Hook",
    "KernelsConfig",
    "LMEvalModel",
    "LatentAttention",
    "LayerInputs",
    "Layers",
    "Loader",
    "LogConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "Run",
    "Shape",
    "Stages",
    "TrainConfig",
    "TrainState",
    "Transformer",
    "UserError",
    "abstract_mesh",
    "abstract_state",
    "act",
    "all_reduce",
    "allgather_attention",
    "attend",
    "broadcast_param",
    "build_schedule",
    "choose_auto",
    "compile_program",
    "compile_step",
    "context_attention",
    "einsum",
    "estimate_step",
    "expert_layer",
    "find_cluster",
    "forward_only",
    "gather_sequence",
    "generate",
    "init_state",
    "layer_order",
    "linear",
    "load_hf",
    "load_run",
    "make_mesh",
    "make_train_step",
    "mean",
    "memory_breakdown",
    "param",
    "pipeline",
    "read_hf_config",
    "read_schedule",
    "reshard",
    "ring_attention",
    "rms_norm",
    "rotate",
    "save_hf",
    "scatter_sequence",
    "sequence_order",
    "simulate_step",
    "smap",
    "stage_layers",
    "target_devices",
    "train",
    "ulysses_attention",
    "vary",
    "zigzag_attention",
]

if importlib.util.find_spec("lm_eval") is None:  # the extra lm-eval
    __all__.remove("LMEvalModel")

_HOME = {
    "Attention": "models.attention",
    "Batch": "hooks",
    "CheckpointConfig": "config",
    "Config": "config",
    "ContextConfig": "config",
    "DataConfig": "config",
    "Experts": "config",
    "Hook": "hooks",
    "KernelsConfig": "config",
    "LMEvalModel": "cli.lm_eval_model",
    "LatentAttention": "config",
    "LayerInputs": "models.inputs",
    "Layers": "models.block",
    "Loader": "data.loader",
    "LogConfig": "config",
    "MLP": "models.layers",
    "MeshConfig": "config",
    "MoEConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "Run": "plan.workload",
    "Shape": "training.model_shape:ModelShape",
    "Stages": "parallel.pipeline.stages",
    "TrainConfig": "config",
    "TrainState": "train_step.state",
    "Transformer": "models.transformer",
    "UserError": "config",
    "abstract_mesh": "sharding.mesh",
    "abstract_state": "train_step.state",
    "act": "sharding.rules",
    "all_reduce": "sharding.primitives",
    "allgather_attention": "parallel.context.attention",
    "attend": "models.attention",
    "broadcast_param": "sharding.primitives",
    "build_schedule": "parallel.pipeline.schedules:build",
    "choose_auto": "plan.auto",
    "compile_program": "plan.compiled.compile",
    "compile_step": "plan.compiled.compile",
    "context_attention": "parallel.context.attention",
    "einsum": "sharding.primitives",
    "estimate_step": "plan.formulas.step_time:estimate",
    "expert_layer": "parallel.experts.exchange",
    "find_cluster": "plan.hardware",
    "forward_only": "parallel.pipeline.orders",
    "gather_sequence": "models.layers",
    "generate": "models.generate",
    "init_state": "train_step.state",
    "layer_order": "parallel.pipeline.schedules",
    "linear": "models.fp8",
    "load_hf": "huggingface.checkpoint:load",
    "load_run": "checkpoint.load_params:load_params",
    "make_mesh": "sharding.mesh",
    "make_train_step": "train_step.step",
    "mean": "sharding.primitives",
    "memory_breakdown": "plan.formulas.memory:breakdown",
    "param": "models.layers",
    "pipeline": "parallel.pipeline.executor",
    "read_hf_config": "huggingface.config:read_config",
    "read_schedule": "parallel.pipeline.table_csv:read_csv",
    "reshard": "sharding.primitives",
    "ring_attention": "parallel.context.attention",
    "rms_norm": "models.layers",
    "rotate": "models.rotary",
    "save_hf": "huggingface.checkpoint:save",
    "scatter_sequence": "models.layers",
    "sequence_order": "parallel.context.layout",
    "simulate_step": "plan.compiled.compile",
    "smap": "sharding.manual",
    "stage_layers": "parallel.pipeline.schedules",
    "target_devices": "plan.compiled.compile",
    "train": "training.loop",
    "ulysses_attention": "parallel.context.attention",
    "vary": "sharding.rules",
    "zigzag_attention": "parallel.context.attention",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
