"""Muon's updates on meshes, against Newton-Schulz of each matrix in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.config.training import NEWTON_SCHULZ_ITERATIONS
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import place, stored_spec
from ultrascale_jax.train_step.muon import COEFFICIENTS, orthogonalize

STACKS = {
    "LDNH": (4, 32, 8, 4),
    "LDKH": (4, 32, 2, 4),  # fewer heads than some tensor groups
    "LNHD": (4, 8, 4, 32),
    "LDF": (4, 32, 48),
    "LFD": (4, 48, 32),
    "LEDF": (2, 4, 32, 16),
    "LEFD": (2, 4, 16, 32),
    "LYDW": (2, 4, 32, 16),
    "LDX": (2, 32, 4),
    "LDQ": (2, 32, 8),
    "LQNH": (2, 8, 8, 4),
}
"""Dims and shapes: of attention, MLP, experts, a router and latents."""

MATRIX_DIMS = {"LDNH": (1, 2), "LDKH": (1, 2), "LNHD": (1, 3), "LQNH": (1, 2)}
"""First dim of the rows and of the columns, where a matrix has more than two dims."""


def expected(dims: str, stack: np.ndarray) -> np.ndarray:
    """Return the updates of a stack, matrix by matrix."""
    numbers = 2 if {"E", "Y"} & {*dims} else 1
    rows = MATRIX_DIMS.get(dims, (numbers, numbers + 1))[1]
    height = int(np.prod(stack.shape[numbers:rows]))
    matrices = stack.reshape(-1, height, int(np.prod(stack.shape[rows:]))).astype(np.float64)
    a, b, c = COEFFICIENTS
    results = []
    for x in matrices:
        x = x / np.linalg.norm(x)
        for _ in range(NEWTON_SCHULZ_ITERATIONS):
            gram = x @ x.T
            x = a * x + b * gram @ x + c * gram @ gram @ x
        results.append(0.2 * max(x.shape) ** 0.5 * x)
    return np.stack(results).reshape(stack.shape)


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2,sp=2", "pp=2,ep=2,tp=2", "cp=2,sp=2,tp=2"])
def test_every_matrix_is_orthogonalized_as_a_whole(mesh):
    rng = np.random.default_rng(0)
    stacks = {dims: rng.normal(size=shape) for dims, shape in STACKS.items()}
    with jax.set_mesh(make_mesh(MeshConfig.parse(mesh), jax.devices())):
        placed = [
            place(jnp.asarray(x, jnp.float32), stored_spec(dims, x.shape))
            for dims, x in stacks.items()
        ]
        updates = jax.jit(lambda stacks: orthogonalize(stacks, [*STACKS], jnp.float32))(placed)
    for (dims, stack), before, update in zip(stacks.items(), placed, updates, strict=True):
        assert update.sharding == before.sharding
        wanted = expected(dims, stack)
        np.testing.assert_allclose(update, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
