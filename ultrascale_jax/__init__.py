"""The Ultra-Scale Playbook as running software: train language models on any mesh of GPUs with JAX.

The public API is imported on first use, so `import ultrascale_jax` is quick and needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultrascale_jax.checkpoint.load_params import load_params as load_run
    from ultrascale_jax.checkpoint.mesh_independent import gather_stages
    from ultrascale_jax.checkpoint.tree import load_tree, save_tree, tree_meta
    from ultrascale_jax.cli.lm_eval_model import LMEvalModel
    from ultrascale_jax.config import (
        CheckpointConfig,
        Config,
        ContextConfig,
        DataConfig,
        Distill,
        Dpo,
        Experts,
        FullAttention,
        Keep,
        KernelsConfig,
        LatentAttention,
        LinearAttention,
        LogConfig,
        Lora,
        MeshConfig,
        ModelConfig,
        MoEConfig,
        Multipliers,
        OptimConfig,
        PipelineConfig,
        Split,
        TrainConfig,
        UserError,
    )
    from ultrascale_jax.config.lowering import Lowering
    from ultrascale_jax.data.loader import Loader
    from ultrascale_jax.data.sources import documents_of
    from ultrascale_jax.hooks import Batch, Hook
    from ultrascale_jax.huggingface.arrays import read_hf
    from ultrascale_jax.huggingface.checkpoint import load as load_hf
    from ultrascale_jax.huggingface.checkpoint import save as save_hf
    from ultrascale_jax.huggingface.config import read_config as read_hf_config
    from ultrascale_jax.huggingface.tensors import hf_names
    from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy
    from ultrascale_jax.models.attention import Attention, attend
    from ultrascale_jax.models.block import Layers
    from ultrascale_jax.models.fp8 import fp8_dot
    from ultrascale_jax.models.generate import generate
    from ultrascale_jax.models.inputs import LayerInputs
    from ultrascale_jax.models.layers import (
        MLP,
        gather_params,
        gather_sequence,
        param,
        rms_norm,
        scatter_sequence,
    )
    from ultrascale_jax.models.linear import linear
    from ultrascale_jax.models.rotary import rotate
    from ultrascale_jax.models.transformer import Transformer
    from ultrascale_jax.parallel.context.attention import (
        allgather_attention,
        context_attention,
        ring_attention,
        ulysses_attention,
        zigzag_attention,
    )
    from ultrascale_jax.parallel.experts.exchange import expert_exchange, expert_layer
    from ultrascale_jax.parallel.pipeline.executor import Pipelined, pipeline
    from ultrascale_jax.parallel.pipeline.loss import pipeline_loss
    from ultrascale_jax.parallel.pipeline.orders import forward_only
    from ultrascale_jax.parallel.pipeline.schedules import build as build_schedule
    from ultrascale_jax.parallel.pipeline.schedules import layer_order
    from ultrascale_jax.parallel.pipeline.stages import Stages
    from ultrascale_jax.parallel.pipeline.table import Schedule
    from ultrascale_jax.parallel.pipeline.table_csv import read_csv as read_schedule
    from ultrascale_jax.parallel.prefetch import prefetch_scan
    from ultrascale_jax.plan.auto import choose_auto
    from ultrascale_jax.plan.compiled.compile import (
        CompiledProgram,
        compile_program,
        compile_step,
        simulate_step,
        target_devices,
    )
    from ultrascale_jax.plan.compiled.timeline import Timeline
    from ultrascale_jax.plan.formulas.memory import MemoryBreakdown
    from ultrascale_jax.plan.formulas.memory import breakdown as memory_breakdown
    from ultrascale_jax.plan.formulas.step_time import estimate as estimate_step
    from ultrascale_jax.plan.hardware import Cluster, Gpu, find_cluster
    from ultrascale_jax.plan.model_shape import ModelShape as Shape
    from ultrascale_jax.plan.prediction import StepPrediction
    from ultrascale_jax.plan.search.ranking import Candidate, search
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
    from ultrascale_jax.sharding.sequence_order import sequence_order
    from ultrascale_jax.train_step.optim import schedule as lr_schedule
    from ultrascale_jax.train_step.state import TrainState, abstract_state, init_state
    from ultrascale_jax.train_step.step import make_train_step
    from ultrascale_jax.training.loop import train
    from ultrascale_jax.training.setup import make_loader

__version__ = "0.1.0"

_HOME = {
    "checkpoint.load_params": "load_run",
    "checkpoint.mesh_independent": "gather_stages",
    "checkpoint.tree": "load_tree save_tree tree_meta",
    "cli.lm_eval_model": "LMEvalModel",
    "config": (
        "CheckpointConfig Config ContextConfig DataConfig Distill Dpo Experts FullAttention Keep KernelsConfig "
        "LatentAttention LinearAttention LogConfig Lora MeshConfig MoEConfig ModelConfig Multipliers OptimConfig "
        "PipelineConfig Split TrainConfig UserError"
    ),
    "config.lowering": "Lowering",
    "data.loader": "Loader",
    "data.sources": "documents_of",
    "hooks": "Batch Hook",
    "huggingface.arrays": "read_hf",
    "huggingface.checkpoint": "load_hf save_hf",
    "huggingface.config": "read_hf_config",
    "huggingface.tensors": "hf_names",
    "kernels.linear_cross_entropy": "linear_cross_entropy",
    "models.attention": "Attention attend",
    "models.block": "Layers",
    "models.fp8": "fp8_dot",
    "models.generate": "generate",
    "models.inputs": "LayerInputs",
    "models.layers": "MLP gather_params gather_sequence param rms_norm scatter_sequence",
    "models.linear": "linear",
    "models.rotary": "rotate",
    "models.transformer": "Transformer",
    "parallel.context.attention": (
        "allgather_attention context_attention ring_attention ulysses_attention zigzag_attention"
    ),
    "sharding.sequence_order": "sequence_order",
    "parallel.experts.exchange": "expert_exchange expert_layer",
    "parallel.pipeline.executor": "Pipelined pipeline",
    "parallel.pipeline.loss": "pipeline_loss",
    "parallel.pipeline.orders": "forward_only",
    "parallel.pipeline.schedules": "build_schedule layer_order",
    "parallel.pipeline.stages": "Stages",
    "parallel.pipeline.table": "Schedule",
    "parallel.pipeline.table_csv": "read_schedule",
    "parallel.prefetch": "prefetch_scan",
    "plan.auto": "choose_auto",
    "plan.compiled.compile": "CompiledProgram compile_program compile_step simulate_step target_devices",
    "plan.compiled.timeline": "Timeline",
    "plan.formulas.memory": "MemoryBreakdown memory_breakdown",
    "plan.formulas.step_time": "estimate_step",
    "plan.hardware": "Cluster Gpu find_cluster",
    "plan.prediction": "StepPrediction",
    "plan.search.ranking": "Candidate search",
    "plan.workload": "Run",
    "sharding.manual": "smap",
    "sharding.mesh": "abstract_mesh make_mesh",
    "sharding.primitives": "all_reduce broadcast_param einsum mean reshard",
    "sharding.rules": "act vary",
    "train_step.optim": "lr_schedule",
    "train_step.state": "TrainState abstract_state init_state",
    "train_step.step": "make_train_step",
    "training.loop": "train",
    "plan.model_shape": "Shape",
    "training.setup": "make_loader",
}
"""Public names by the module that has them."""

_THERE = {
    "Shape": "ModelShape",
    "build_schedule": "build",
    "estimate_step": "estimate",
    "load_hf": "load",
    "load_run": "load_params",
    "lr_schedule": "schedule",
    "memory_breakdown": "breakdown",
    "read_hf_config": "read_config",
    "read_schedule": "read_csv",
    "save_hf": "save",
}
"""Public names that are called otherwise there."""

_MODULES = {name: module for module, names in _HOME.items() for name in names.split()}

_OF_EXTRAS = {"LMEvalModel"}
"""Names that import the library of an extra: a star import goes without them."""

__all__ = sorted(_MODULES.keys() - _OF_EXTRAS)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    globals()[name] = value = getattr(module, _THERE.get(name, name))
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
