"""Which numbers are held in which type; the one place where the policy stands.

float32: master parameters, optimizer state, gradient accumulators, norms, softmax, loss. Compute type: matmuls, the
residual stream, what travels between devices. Fp8 will be another row here.
"""

import jax.numpy as jnp

COMPUTE = {"bf16": jnp.bfloat16, "fp32": jnp.float32}
"""`train.precision` to the type of compute."""
