"""Shapes on which kernels are tested and timed: those of known models at 8,192 tokens a GPU, and tiny ones.

Shapes named `tiny` run in the GPU interpreter, on a laptop.
"""

RMS_NORM = {
    "llama3_1b": (8192, 2048),
    "llama3_8b": (8192, 4096),
    "llama3_70b": (8192, 8192),
    "tiny": (11, 4096),
}
"""`[M, D]`: tokens, model."""

ATTENTION = {
    "llama3_1b": (1, 8192, 32, 8, 64),
    "llama3_8b": (1, 8192, 32, 8, 128),
    "llama3_70b": (1, 8192, 64, 8, 128),
    "tiny": (1, 384, 2, 1, 128),
}
"""`[B, T, N, K, H]`: batch, tokens, query heads, key heads, head dim."""

QUANTIZE_FP8 = {
    "llama3_1b": (8192, 2048),
    "llama3_8b": (8192, 4096),
    "llama3_70b": (8192, 8192),
    "tiny": (384, 256),
}
"""`[M, K]`: tokens, what a product contracts."""

FP8_MATMUL = {
    "llama3_1b": (8192, 8192, 2048),
    "llama3_8b": (8192, 14336, 4096),
    "llama3_70b": (8192, 28672, 8192),
    "tiny": (256, 128, 384),
}
"""`[M, N, K]`: tokens, width of the feed-forward layer, model."""

LINEAR_CROSS_ENTROPY = {
    "llama3_1b": (8192, 2048, 128256),
    "llama3_8b": (8192, 4096, 128256),
    "llama3_70b": (8192, 8192, 128256),
    "tiny": (128, 256, 384),
}
"""`[M, D, V]`: tokens, model, vocabulary."""
