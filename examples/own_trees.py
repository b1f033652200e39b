"""Keep any pytree on disk, read it on another mesh, and read Hugging Face tensors: `python own_trees.py [FOLDER]`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a laptop: eight fake devices
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import sys
import tempfile

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us


def placed(tree, mesh):
    """Return the tree's shapes, with the first dim of each matrix split over the mesh."""

    def leaf(x):
        spec = P(mesh.axis_names) if x.ndim > 1 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, tree)


def write_folder(folder):
    """Write a small model as a Hugging Face folder."""
    cfg = us.Config(mesh=us.MeshConfig(fsdp=8)).check(8)
    mesh = us.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        us.save_hf(us.init_state(cfg, mesh).params, cfg.model, folder)


def main(folder: str | None = None):
    with tempfile.TemporaryDirectory() as out:
        if folder is None:
            write_folder(folder := f"{out}/model")
        two_axes = jax.make_mesh((2, 4), ("rows", "columns"))
        names = us.hf_names(us.read_hf_config(folder))["stacks.0.attn.w_q"]
        weights = us.read_hf(
            folder, names, place=lambda name, shape: NamedSharding(two_axes, P("rows", "columns"))
        )
        tree = {"weights": weights, "adam": optax.adam(1e-3).init(weights)}
        us.save_tree(f"{out}/trees", tree, step=7, meta={"tokens": 7000})
        one_axis = jax.make_mesh((8,), ("devices",))
        loaded = us.load_tree(f"{out}/trees", placed(tree, one_axis))
        print(us.tree_meta(f"{out}/trees"), *(w.sharding.spec for w in loaded["weights"].values()))
    return jax.device_get(loaded), jax.device_get(tree)


if __name__ == "__main__":
    main(*sys.argv[1:])
