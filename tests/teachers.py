"""A teacher of another size than its student, for tests of distillation."""

from ultrascale_jax.config import Distill, ModelConfig

SIZES = {"vocab_size": 62, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8}
TEACHER = ModelConfig(d_model=64, d_ff=96, num_layers=3, qk_norm="head", **SIZES)
DISTILL = Distill(teacher="hf:x", model=TEACHER, temperature=2.0, hard_weight=0.3)
