"""`pipeline_loss` against one device: any x, learned context, tensor parallelism, and ticks in which ranks idle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ultrascale_jax as us
from ultrascale_jax.parallel.pipeline import layer_loop
from ultrascale_jax.parallel.pipeline.program import assemble

M, ROWS, D = 4, 4, 8
SPECS = {"up": P("stage", None, "model"), "down": P("stage", "model")}


def layer(params, x, context, total=lambda y: y):
    gain = jnp.where(context["kind"] > 0, 1.0, 0.5)[:, None]
    h = x["h"] + total(jnp.tanh(x["h"] @ params["up"]) @ params["down"]) * gain + context["time"]
    return {"h": h, "norm": x["norm"] + jnp.mean(h * h, -1)}, 0.01 * jnp.mean(h * h)


def split_layer(params, x, context):
    """Sum the product over the axis that splits the matrices."""
    return layer(params, x, context, lambda y: lax.psum(y, "model"))


def embed(shared, batch):
    h = batch["x"] @ shared["in"]
    return {"h": h, "norm": h[:, 0]}


def head(shared, x, batch):
    loss = jnp.mean((x["h"] @ shared["out"] - batch["y"]) ** 2) + jnp.mean(x["norm"])
    return loss, {"loss": loss, "target": jnp.mean(batch["y"])}


def context(shared, batch):
    return {"time": batch["time"] @ shared["time"], "kind": batch["kind"]}


def plain(blocks, shared, batches, layer=layer, head=head):
    def one(batch):
        around = context(shared, batch)
        x, aux = lax.scan(lambda x, p: layer(p, x, around), embed(shared, batch), blocks)
        loss, metrics = head(shared, x, batch)
        return loss + aux.sum(), metrics

    return jax.tree.map(jnp.mean, jax.vmap(one)(batches))


def arrays(layers, dtype=np.float32, count=M):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) / shape[-2] ** 0.5 / 2).astype(dtype)

    blocks = {"up": normal(layers, D, 2 * D), "down": normal(layers, 2 * D, D)}
    shared = {"in": normal(3, D), "out": normal(D, 2), "time": normal(5, D)}
    sizes = {"x": 3, "y": 2, "time": 5}
    batches = {name: normal(count, ROWS, size) for name, size in sizes.items()}
    return blocks, shared, batches | {"kind": rng.integers(0, 2, (count, ROWS), dtype=np.int32)}


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("stage", "data", "model"), axis_types=(kind,) * 3)


def surrounding(loss, blocks, shared, batches):
    """Return twice the loss and the metrics, with the gradients of all arguments that have one."""
    floats = {name: a for name, a in batches.items() if name != "kind"}

    def twice(blocks, shared, floats):
        value, metrics = loss(blocks, shared, batches | floats)
        return 2 * value, metrics

    return jax.jit(jax.value_and_grad(twice, (0, 1, 2), has_aux=True))(blocks, shared, floats)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        atol = 1e-5 * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def test_a_surrounding_loss_has_the_gradients_of_one_device():
    inputs, mesh = arrays(5), make_mesh(AxisType.Explicit)
    loss = us.pipeline_loss(
        split_layer, embed, head, schedule=us.build_schedule("zb_uniform", 2, M, 2), mesh=mesh,
        stage_axis="stage", batch_axes="data", context=context, block_specs=SPECS,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        found = surrounding(loss, *inputs)
    assert_equal(found, surrounding(plain, *inputs))


def test_64_bit_types_sums_and_inputs_of_stages_and_the_loss_alone():
    inputs = arrays(5, np.float64)
    # Without `mesh.set_mesh` and `jit` around it, as in a notebook.
    make = functools.partial(
        us.pipeline_loss, layer, embed, head, schedule=us.build_schedule("zb_v", 2, M),
        mesh=make_mesh(), stage_axis="stage", batch_axes=("data", "model"), context=context,
    )  # fmt: skip
    with jax.enable_x64(True):
        expected = jax.value_and_grad(plain, (0, 1), has_aux=True)(*inputs)
        loss = make(reduction="sum", stash="input")
        found = jax.value_and_grad(loss, (0, 1), has_aux=True)(*inputs)
        assert all(grad.dtype == np.float64 for grad in jax.tree.leaves(found[1]))
        assert_equal(jax.tree.map(lambda a: a / (4 * M), found), expected)
        alone = make()(*inputs)
        assert_equal(alone, expected[0])


def test_a_weighted_mean_over_all_rows_divides_by_the_mean_of_the_devices_sums():
    _, shared, batches = arrays(2)
    gains = np.float32([0.5, 2.0])

    def error(shared, x, batch, mean=lambda total: total):
        weights = batch["time"][:, :1] ** 2
        return jnp.sum(weights * (x["h"] @ shared["out"] - batch["y"]) ** 2) / mean(
            jnp.sum(weights)
        )

    def one_device(batch):
        return error(shared, {"h": embed(shared, batch)["h"] * gains.prod()}, batch)

    loss = us.pipeline_loss(
        lambda gain, x: x | {"h": x["h"] * gain}, embed,
        functools.partial(error, mean=lambda total: lax.pmean(total, "data")),
        schedule=us.build_schedule("1f1b", 2, M), mesh=make_mesh(), stage_axis="stage", batch_axes="data",
    )  # fmt: skip
    assert_equal(loss(gains, shared, batches), jnp.mean(jax.vmap(one_device)(batches)))


def normed(x):
    """Divide by the root of the mean square, which is 0 where nothing was stored yet."""
    return x | {"h": x["h"] * lax.rsqrt(jnp.mean(x["h"] ** 2, -1, keepdims=True))}


def test_idle_ticks_of_layers_add_nothing_not_even_nan():
    def normed_layer(params, x, context):
        return layer(params, normed(x), context)

    inputs = arrays(4)
    loss = us.pipeline_loss(
        normed_layer, embed, head, schedule=us.build_schedule("zb_h1", 2, M), mesh=make_mesh(),
        stage_axis="stage", batch_axes="data", context=context,
    )  # fmt: skip
    expected = surrounding(functools.partial(plain, layer=normed_layer), *inputs)
    assert_equal(surrounding(loss, *inputs), expected)


def test_a_masked_tick_of_the_head_adds_nothing_not_even_nan():
    """Idle ticks too few for a branch, too many for a scan each: the head runs in them, on zeros."""
    table = us.build_schedule("1f1b", 1, 64)
    ticks = [
        row for t, row in enumerate(table.ticks) for row in ([row, ({},)] if t % 12 == 6 else [row])
    ]
    gaps = table.with_ticks(ticks).check()
    [segment] = assemble(gaps).segments
    assert 0.9 <= assemble(gaps).every["head"].mean() < 1 and segment.kinds == {"F", "B"}

    def normed_head(shared, x, batch):
        return head(shared, normed(x), batch)

    inputs = arrays(2, count=64)
    mesh = jax.make_mesh((1, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    loss = us.pipeline_loss(
        layer, embed, normed_head, schedule=gaps, mesh=mesh, stage_axis="stage", batch_axes="data",
        context=context,
    )  # fmt: skip
    expected = surrounding(functools.partial(plain, head=normed_head), *inputs)
    assert_equal(surrounding(loss, *inputs), expected)


def test_the_backward_pass_is_cut_in_two_only_for_a_schedule_that_splits_it(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("cut in two")

    monkeypatch.setattr(layer_loop, "SplitBackward", refuse)
    inputs = arrays(2)

    def trace(name):
        loss = us.pipeline_loss(
            layer, embed, head, schedule=us.build_schedule(name, 2, M), mesh=make_mesh(),
            stage_axis="stage", context=context,
        )  # fmt: skip
        jax.eval_shape(jax.value_and_grad(loss, has_aux=True), *inputs)

    trace("1f1b")
    with pytest.raises(AssertionError, match="cut in two"):
        trace("zb_h1")


def wrapped(change):
    """Trace the loss of `arrays` with some arguments changed."""
    settings = {
        "layer": layer, "embed": embed, "head": head, "context": context, "batch_axes": "data",
        "schedule": us.build_schedule("1f1b", 2, M), "mesh": make_mesh(), "stage_axis": "stage",
    }  # fmt: skip
    blocks, shared, batches = arrays(4)
    inputs = {"blocks": blocks, "shared": shared, "batches": batches}
    inputs |= {name: change.pop(name) for name in inputs.keys() & change.keys()}
    functions = settings | change
    return jax.eval_shape(us.pipeline_loss(**functions), *inputs.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "1f1b"}, "^schedule: .*build_schedule makes one"),
        ({"schedule": us.forward_only(2, 1, "loop", M)}, "^schedule='.*': has no backward"),
        ({"schedule": us.build_schedule("1f1b", 4, M)},
         r"^schedule.ranks=4: the mesh has 2 devices on axis 'stage'; build_schedule\(name, 2, M\)"),
        ({"schedule": us.build_schedule("1f1b", 2, 8)}, r"^micro-batches=\[4\]: the schedule has 8"),
        ({"stage_axis": "pp"}, "^stage_axis='pp': must be an axis of the mesh: stage, data, model"),
        ({"batch_axes": "dp"}, "^batch_axes='dp': must be other axes"),
        ({"reduction": "max"}, "^reduction='max': must be one of"),
        ({"context": None}, r"^layer.*: is called as layer\(params, x\); give the pipeline a context"),
        ({"embed": lambda batch: batch["x"]}, r"is called as embed\(shared, batch\)"),
        ({"layer": lambda params, x, context: (x, x["h"])}, "^the auxiliary loss of layer=.*scalar"),
        ({"head": lambda shared, x, batch: x["norm"]}, "^the loss of head=.*: must be a scalar"),
        ({"block_specs": SPECS}, r"^the auxiliary loss of layer=\['model'\]: differs between the devices"),
        ({"block_specs": P(None, "data")}, "^block_specs=.*must begin with 'stage'"),
        ({"block_specs": {"up": P("stage")}}, "^block_specs=.*tree of specs like its argument"),
        ({"blocks": {"up": np.ones((4, D, D), np.int32)}}, "^blocks=.*: must hold floats alone"),
        ({"blocks": {"up": np.ones((1, D, D))}}, "^layers of blocks=1: the schedule has 2 ranks"),
        ({"blocks": {"up": np.ones((4, D)), "down": np.ones((5, D))}}, r"^blocks=\[4, 5\]: .*one number"),
        ({"batches": {"x": np.ones((M, 3, 3))}}, "^rows of a micro-batch=3: must be divisible by the 2"),
        ({"batches": {"x": np.ones((M, 4, 3)), "time": np.ones((M, 5))}}, "give batch_specs"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(change, message):
    with pytest.raises((us.UserError, ValueError), match=message):
        wrapped(dict(change))


def test_a_closed_over_value_that_is_differentiated_is_refused_and_not_left_out():
    mesh, (blocks, shared, batches) = make_mesh(), arrays(4)

    def outer(scale):
        loss = us.pipeline_loss(
            layer, lambda shared, batch: jax.tree.map(lambda a: scale * a, embed(shared, batch)),
            head, schedule=us.build_schedule("1f1b", 2, M), mesh=mesh, stage_axis="stage",
            context=context,
        )  # fmt: skip
        return loss(blocks, shared, batches)[0]

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.grad(outer)(jnp.float32(2))
