"""The H100 program of packed documents: a call for each class of lengths, and no array of T x S."""

from tests.gpu_programs import FAST, MODEL, compile_once
from ultrascale_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from ultrascale_jax.hlo.attention import attention_calls
from ultrascale_jax.kernels.document_classes import class_lengths, class_segments

T, GPUS = 2048, 8


def check_documents(**mesh: int) -> None:
    """Assert that the program on this mesh attends by classes of lengths and has no mask."""
    cfg = Config(
        model=MODEL,
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=T),
        train=TrainConfig(global_batch=16, microbatches=2, remat="selective"),
    )
    step = compile_once(cfg, GPUS, tuple(FAST.items()))
    bodies = step.module.computations.values()
    squares = [i.name for body in bodies for i in body for a in i.arrays if a.dims.count(T) > 1]
    assert squares == []
    tokens = GPUS // cfg.mesh.batch * T
    classes = list(zip(class_lengths(T), class_segments(T), strict=True))
    calls = attention_calls(step.module)
    assert {(call.backward, call.operands[0].dims, call.segments) for call in calls} == {
        (backward, (tokens // L, L, MODEL.num_heads, MODEL.head_dim), M)
        for backward in (False, True)
        for L, M in classes
    }
