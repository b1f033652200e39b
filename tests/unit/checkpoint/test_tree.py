"""Trees of arrays of one's own: saved with fingerprints, loaded on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.checkpoints import array_files, flip
from ultrascale_jax.checkpoint.tree import load_tree, save_tree, tree_meta
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.failures import Damaged


def placed(tree, **axes):
    """Split the first dim of each array over a mesh of these axes; a scalar is on all devices."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))

    def place(x):
        spec = P(tuple(axes)) if np.ndim(x) and np.shape(x)[0] % 8 == 0 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(keys[0], (16, 8)),
        "0": (jnp.int8([3, -4]), jnp.bool_([True, False])),
        "b": jax.random.normal(keys[1], (8,), jnp.bfloat16),
        "a/b": [jnp.uint32(7), np.float16([1.5])],
    }


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_a_tree_returns_on_another_mesh_in_the_shardings_that_are_asked_for(tmp_path):
    saved = placed(arrays(), rows=8)
    place = save_tree(tmp_path, saved, step=3, meta={"loss": 1.5})
    assert place == tmp_path / "3"
    like = shapes(placed(arrays(), a=2, b=4))
    loaded = load_tree(tmp_path, like)
    assert_equal(loaded, saved)
    assert jax.tree.map(lambda x: x.sharding, loaded) == jax.tree.map(lambda x: x.sharding, like)
    assert tree_meta(tmp_path) == {"loss": 1.5}


def test_modules_optimizer_states_and_arrays_of_several_meshes_are_trees(tmp_path):
    params = nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    tree = {"params": params, "opt": optax.adam(1e-3).init(params), "host": np.ones(3, np.float32)}
    arrays = {"a": placed(jnp.arange(8.0), rows=8), "b": placed(jnp.arange(8.0), a=2, b=4)}
    save_tree(tmp_path, {"tree": tree, "arrays": arrays}, step=0)
    # Some by structs without a sharding.
    like = {"tree": jax.eval_shape(lambda: tree), "arrays": arrays}
    loaded = load_tree(tmp_path, like)
    assert_equal(loaded, {"tree": tree, "arrays": arrays})
    assert loaded["arrays"]["b"].sharding == arrays["b"].sharding


def test_arrays_are_cast_to_the_types_of_like_and_to_none_that_cannot_hold_them(tmp_path):
    types = ("float32", "int8", "uint8", "bool", "int32")
    save_tree(tmp_path, {name: jnp.ones(4, name) for name in types}, step=1)
    like = {name: jnp.ones(4, name) for name in types}
    wanted = {"float32": "bfloat16", "int8": "bfloat16", "uint8": "int32", "bool": "float32"}
    cast = like | {name: jnp.ones(4, dtype) for name, dtype in wanted.items()}
    assert_equal(load_tree(tmp_path, cast), cast)
    refused = (("float32", "bool"), ("int32", "float32"), ("int32", "int8"))
    for saved, dtype in (*refused, ("int8", "float8_e4m3fn")):
        with pytest.raises(UserError, match=f"dtype='{dtype}': cannot hold the values of {saved}"):
            load_tree(tmp_path, like | {saved: jnp.zeros(4, dtype)})


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)  # Orbax's threads do not see `jax.enable_x64`
    yield
    jax.config.update("jax_enable_x64", False)


def test_numbers_of_eight_bytes_keep_their_bits(tmp_path, x64):
    tree = placed({"x": jnp.arange(16.0) / 3, "n": jnp.int64(2**40 + 1)}, rows=8)
    save_tree(tmp_path, tree, step=1)
    assert_equal(load_tree(tmp_path, shapes(tree)), tree)


def test_a_damaged_tree_is_refused_and_the_one_before_it_taken(tmp_path, capfd):
    old, new = {"w": jnp.zeros(4096)}, {"w": jax.random.normal(jax.random.key(1), (4096,))}
    save_tree(tmp_path, old, step=1)
    path, *_ = array_files(save_tree(tmp_path, new, step=2))
    flip(path, path.stat().st_size // 2)
    message = r"does not restore as it was saved: array tree\['w'\] is not what was saved"
    with pytest.raises(Damaged, match=message):
        load_tree(tmp_path, new, step=2)
    assert_equal(load_tree(tmp_path, new), old)
    assert "using step 1" in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": "text"}, r"tree\['w'\]='text': is no array"),
        ({"key": jax.random.key(0)}, r"tree\['key'\].dtype='key<fry>': .*key_data"),
        ({"z": np.ones(2, np.complex64)}, r"tree\['z'\].dtype='complex64': has no fingerprint"),
        ({"n": np.ones(2)}, r"tree\['n'\].dtype='float64': would be saved as float32; cast it"),
        ({}, "has no leaves"),
    ],
)
def test_a_leaf_that_cannot_be_saved_is_named(tmp_path, tree, message):
    with pytest.raises(UserError, match=message):
        save_tree(tmp_path, tree, step=0)
    assert not list(tmp_path.iterdir())


def test_a_step_may_be_any_integer_and_is_never_written_over(tmp_path):
    tree, step = {"w": jnp.zeros(2)}, np.int64(1)
    assert save_tree(tmp_path, tree, step=step, meta={"a": 1}) == tmp_path / "1"
    with pytest.raises(UserError, match=r"step=1: .* has it; remove it, or choose another"):
        save_tree(tmp_path, {"w": jnp.ones(2)}, step=1)
    for same in (step, jnp.int32(1), np.array(1)):
        assert_equal(load_tree(tmp_path, tree, step=same), tree)
        assert tree_meta(tmp_path, step=same) == {"a": 1}


@pytest.mark.parametrize(
    ("like", "step", "message"),
    [
        ({"w": jnp.zeros((2, 2))}, None, r"^like\['w'\].shape=\(2, 2\): .*1 holds \(4,\) there"),
        (
            {"w": jnp.zeros(4), "b": jnp.zeros(4)},
            None,
            r"like=\[\"\['b'\]\"\]: .* lacks 1 such arrays",
        ),
        ({"v": jnp.zeros(4)}, None, r"like=\[\"\['v'\]\"\]"),
        ({"w": 1.0}, None, r"like\['w'\]=1.0: is neither an array nor"),
        ({"w": jnp.zeros(4)}, 2, r"step=2: .* holds the steps \[1\]"),
        ({"w": jnp.zeros(4)}, 1.0, r"^step=1.0: must be a whole number"),
    ],
)
def test_a_tree_of_another_form_or_step_is_refused(tmp_path, like, step, message):
    save_tree(tmp_path, {"w": jnp.zeros(4)}, step=1)
    with pytest.raises(UserError, match=message):
        load_tree(tmp_path, like, step=step)
