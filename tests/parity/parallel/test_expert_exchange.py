"""Experts of any kind by `expert_exchange`, against every expert for every token in float64 numpy or dense JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us

N, D, F, E, K, RANK = 64, 8, 12, 8, 2, 3
TIGHT = us.MoEConfig(capacity_factor=1.0)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mlp(params, x_ECD):
    """Two matrices and a bias, no gate."""
    hidden = jnp.einsum("ecd,edf->ecf", x_ECD, params["up"]) + params["bias"][:, None]
    return jnp.einsum("ecf,efd->ecd", jax.nn.relu(hidden) ** 2, params["down"])


def lora(params, x_ECD):
    """One matrix for all experts, which each rank holds a copy of, and a product of two narrow ones for each."""
    narrow = jnp.einsum("ecd,edr->ecr", x_ECD, params["a"])
    base = jnp.einsum("ecd,edg->ecg", x_ECD, params["base"])
    return jnp.tanh(base + jnp.einsum("ecr,erd->ecd", narrow, params["b"]))


PARAMS = {
    mlp: {"up": normal(1, E, D, F), "bias": normal(2, E, F), "down": normal(3, E, F, D)},
    lora: {"base": normal(4, E, D, D), "a": normal(5, E, D, RANK), "b": normal(6, E, RANK, D)},
}
X, WEIGHTS = normal(7, N, D), np.abs(normal(8, N, K))


def routing(kind: str) -> np.ndarray:
    """Distinct experts [N, K]: drawn at random, or all tokens choose the same two."""
    if kind == "one_rank":
        return np.tile(np.array([4, 5], np.int32), (N, 1))
    return np.argsort(np.random.default_rng(9).random((N, E)), axis=1)[:, :K].astype(np.int32)


def dense(expert, params, x, ids, weights):
    """Every expert for every token, one device."""
    every = expert(params, jnp.broadcast_to(x, (E, *x.shape)))
    chosen = jax.nn.one_hot(ids, E, dtype=x.dtype) * weights[..., None]
    return jnp.einsum("nke,end->nd", chosen, every)


def split(expert, mesh, moe=TIGHT):
    """The same on the ranks of the axis `experts` of a mesh, whose other axis splits the tokens too."""
    tokens, own = P(("rows", "experts")), P("experts")

    def region(params, x, ids, weights):
        y, dropped = us.expert_exchange(expert, params, x, ids, weights, axis="experts", moe=moe)
        return y, jax.lax.psum(dropped, ("rows", "experts"))

    specs = (own, tokens, tokens, tokens)
    run = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=(tokens, P()))

    def placed(*arrays):
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        return run(*jax.device_put(arrays, shardings))

    return placed


def mesh_of(rows: int, ranks: int, kind: AxisType = AxisType.Auto):
    return jax.make_mesh((rows, ranks), ("rows", "experts"), axis_types=(kind,) * 2)


def close(found, expected, tolerance=1e-5) -> None:
    def compare(a, b):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()

    jax.tree.map(compare, jax.device_get(found), jax.device_get(expected))


def gradients(layer, ids):
    """Value and gradients of parameters, tokens and weights."""

    def loss(params, x, weights):
        y = layer(params, x, ids, weights)
        y = y[0] if isinstance(y, tuple) else y
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


@pytest.mark.parametrize(
    ("expert", "rows", "ranks", "axes"),
    [(mlp, 2, 4, AxisType.Auto), (lora, 4, 2, AxisType.Explicit)],
    ids=["mlp_4", "lora_2"],
)
def test_values_and_gradients_are_those_of_every_expert_for_every_token(expert, rows, ranks, axes):
    mesh, arrays = mesh_of(rows, ranks, axes), (PARAMS[expert], X, WEIGHTS)
    layers = functools.partial(dense, expert), split(expert, mesh)
    alone, run = (jax.jit(lambda ids, *a, f=f: gradients(f, ids)(*a)) for f in layers)
    for kind in ("random", "one_rank"):
        expected = alone(routing(kind), *arrays)
        with jax.set_mesh(mesh):
            found = run(routing(kind), *arrays)
        close(found, expected)


def test_it_is_a_function_like_any_other():
    """In bfloat16, under `jax.checkpoint`, in a scan, and with JAX's 64 bits."""
    ids, mesh = routing("random"), mesh_of(2, 4)
    layer = split(mlp, mesh)
    expected = jax.jit(functools.partial(dense, mlp))(PARAMS[mlp], X, ids, WEIGHTS)

    def repeated(x):
        body = jax.checkpoint(lambda x, _: (layer(PARAMS[mlp], x, ids, WEIGHTS)[0], ()))
        return jnp.sum(jax.lax.scan(body, x, length=2)[0] ** 2)

    def plainly(x):
        for _ in range(2):
            x = dense(mlp, PARAMS[mlp], x, ids, WEIGHTS)
        return jnp.sum(x**2)

    close(jax.jit(jax.grad(repeated))(X), jax.jit(jax.grad(plainly))(X))
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS[mlp], X))
    y, _ = jax.jit(layer)(*half, ids, WEIGHTS)
    assert y.dtype == jnp.bfloat16
    close(np.float32(y), expected, 0.03)
    with jax.enable_x64(True):
        y, dropped = jax.jit(layer)(PARAMS[mlp], X, ids.astype(np.int64), np.float64(WEIGHTS))
        assert (y.dtype, dropped.dtype) == (np.float32, np.int32)
        close(y, expected)


def test_an_expert_that_is_chosen_twice_gets_the_sum_of_the_weights_on_any_mesh():
    ids = routing("random").copy()
    ids[::3, 1] = ids[::3, 0]
    expected = jax.jit(gradients(functools.partial(dense, mlp), ids))(PARAMS[mlp], X, WEIGHTS)
    for ranks in (1, 4):
        mesh = mesh_of(2, ranks)
        close(jax.jit(gradients(split(mlp, mesh), ids))(PARAMS[mlp], X, WEIGHTS), expected)


def test_rows_without_a_token_leave_no_nan_in_gradients():
    """A norm of zeros has none, and times a weight of 0 the NaN would stay."""

    def normed(params, x_ECD):
        return mlp(params, x_ECD / jnp.linalg.norm(x_ECD, axis=-1, keepdims=True))

    ids, mesh = routing("random"), mesh_of(2, 4)
    expected = jax.jit(gradients(functools.partial(dense, normed), ids))(PARAMS[mlp], X, WEIGHTS)
    close(jax.jit(gradients(split(normed, mesh), ids))(PARAMS[mlp], X, WEIGHTS), expected)


def test_a_number_beyond_int32_is_no_expert():
    ids, mesh = routing("random").astype(np.int64), mesh_of(2, 4)
    ids[0, 0] += 2**32
    with jax.enable_x64(True):
        dropped = jax.jit(split(mlp, mesh))(PARAMS[mlp], X, ids, WEIGHTS)[1]
    assert dropped == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {}}, r"^params: holds no array"),
        ({"params": {"up": X[:0].astype(int)}}, r"^params\['up'\]: want floats \[E, ...\]"),
        (
            {"params": PARAMS[mlp] | {"bias": normal(2, 2 * E, F)}},
            r"^params of shapes .*: want \[E, ...\] for this rank's E experts",
        ),
        ({"expert": "mlp"}, r"^expert='mlp': must be a function \(params, x_ECD\) -> y_ECD"),
        (
            {"expert": lambda params, x_ECD: x_ECD[:, :1]},
            r"^expert: returns \(1, 1, 8\) for x \(1, \d+, 8\); want the same shape",
        ),
        ({"x": X[None]}, r"^x .*: want this rank's tokens \[n, D\]"),
        ({"weights": WEIGHTS[:, :1]}, r"^ids .*, weights .*: want \(8, 2\)"),
        ({"axis": "rows"}, r"^axis='rows': is not manual here"),
    ],
    ids=["no_arrays", "integers", "sizes", "no_function", "shape", "dims", "weights", "axis"],
)
def test_a_mistake_is_one_error(change, message):
    given = {"expert": mlp, "params": PARAMS[mlp], "x": X, "weights": WEIGHTS} | change
    axis = given.pop("axis", "experts")
    arrays = given["params"], given["x"], routing("random"), given["weights"]
    mesh = jax.make_mesh((8,), ("experts",), (AxisType.Auto,))

    def region(*arrays):
        return us.expert_exchange(given["expert"], *arrays, axis=axis)[0]

    specs = (P("experts"), P(None, "experts") if arrays[1].ndim == 3 else P("experts"))
    specs = (*specs, P("experts"), P("experts"))
    with pytest.raises(ValueError, match=message) as refused:
        jax.eval_shape(
            jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=P("experts")), *arrays
        )
    assert "\n" not in str(refused.value)
