"""The executor of pipelines against one device, on toy layers with an auxiliary loss and a split vocabulary."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.parallel.pipeline import layer_loop
from ultrascale_jax.parallel.pipeline.executor import pipeline
from ultrascale_jax.parallel.pipeline.orders import forward_only
from ultrascale_jax.parallel.pipeline.program import assemble
from ultrascale_jax.parallel.pipeline.schedules import build, layer_order
from ultrascale_jax.parallel.pipeline.stages import Stages
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import vary

D, V, T = 8, 32, 4
AUX = 0.1


def layer(p, x, context):
    h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"][None, None] * context
    y = x + jax.nn.silu(h @ p["w_in"]) @ p["w_out"]
    return y, AUX * jnp.mean(y * y)


def make_params(num_layers):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    blocks = {
        "scale": np.ones((num_layers, D), np.float32),
        "w_in": normal(num_layers, D, 16) / 3,
        "w_out": normal(num_layers, 16, D) / 4,
    }
    shared = {"table": normal(V, D), "head": normal(D, V) / 3}
    return blocks, shared


def microbatches(count, rows):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (count, rows, T), dtype=np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 2),
        "angle": rng.random((count, rows, T, 1), np.float32) + 0.5,
    }


def reference(blocks, shared, batches):
    """Loss and gradients on one device, micro-batch by micro-batch."""

    def loss(params):
        blocks, shared = params

        def microbatch(total, batch):
            x = shared["table"][batch["tokens"]]
            x, aux = lax.scan(lambda x, p: layer(p, x, batch["angle"]), x, blocks)
            logp = jax.nn.log_softmax(x @ shared["head"])
            nll = -jnp.take_along_axis(logp, batch["targets"][..., None], -1).mean()
            return total + aux.sum() + nll, None

        return lax.scan(microbatch, jnp.float32(0), batches)[0]

    return jax.value_and_grad(loss)((blocks, shared))


def embed(shared, batch):
    table = shared["table"]
    row = batch["tokens"] - lax.axis_index("pp") * table.shape[0]
    inside = (row >= 0) & (row < table.shape[0])
    return jnp.where(inside[..., None], table[jnp.clip(row, 0, table.shape[0] - 1)], 0)


def head(shared, y, batch):
    logits = y @ shared["head"]
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "pp")
    lse = jnp.log(lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "pp")) + top
    column = jnp.arange(logits.shape[-1]) + lax.axis_index("pp") * logits.shape[-1]
    gold = jnp.where(column[None, None] == batch["targets"][..., None], logits, 0).sum(-1)
    loss = jnp.mean(lse - lax.psum(gold, "pp"))
    return loss, {"loss": loss}


STAGES = Stages(
    layer=layer, embed=embed, embed_parts=True, head=head, context=lambda batch: batch["angle"]
)


def run(schedule, mesh, blocks, shared, batches, *, stages=STAGES, typed=(), **options):
    """Loss and gradients by `pipeline`, in canonical layer order and summed over dp; parameters `typed` as varying."""
    count = blocks["scale"].shape[0]
    order = layer_order(schedule.ranks, schedule.virtual, schedule.placement, count)
    order = options.setdefault("order", order) or order
    stacked = jax.tree.map(  # padding would show if it ran
        lambda a: np.stack([np.full_like(a[0], 7) if o is None else a[o] for o in order]), blocks
    )
    spec = {"table": P("pp"), "head": P(None, "pp")}

    def region(blocks, shared, batches):
        dp = lax.axis_size("dp")
        mine = jax.tree.map(lambda a: vary(a, typed), (blocks, shared))
        out = pipeline(schedule, stages, *mine, batches, **options)
        total = lax.psum(out.objective, "dp") + lax.psum(vary(out.auxiliary, ("dp",)), ("dp", "pp"))
        if out.blocks is None:
            return total / dp, lax.psum(out.metrics["loss"], "dp") / dp
        return total / dp, jax.tree.map(lambda g: lax.psum(g, "dp") / dp, (out.blocks, out.shared))

    trains = any("B" in cell for row in schedule.ticks for cell in row)
    with jax.set_mesh(mesh):
        fn = smap(
            region,
            in_specs=(P("pp"), spec, P(None, "dp")),
            out_specs=(P(), (P("pp"), spec) if trains else P()),
        )
        specs = (
            jax.tree.map(lambda _: P("pp"), stacked),
            spec,
            jax.tree.map(lambda _: P(None, "dp"), batches),
        )
        inputs = jax.tree.map(
            lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)),
            (stacked, shared, batches),
            specs,
        )
        loss, rest = jax.jit(fn)(*inputs)
    if not trains:
        return loss, rest
    blocks_grads, shared_grads = jax.device_get(rest)
    where, padding = [order.index(i) for i in range(count)], [layer is None for layer in order]
    assert not any(grad[padding].any() for grad in jax.tree.leaves(blocks_grads))
    return loss, (jax.tree.map(lambda a: a[where], blocks_grads), shared_grads)


def assert_equal(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)


@functools.cache
def expected(num_layers, count, rows):
    return jax.jit(reference)(*make_params(num_layers), microbatches(count, rows))


def check(schedule, layers: int, rows: int = 4, **options) -> None:
    """Compare a schedule over `pp`, on eight devices with `dp`, with one device."""
    mesh = make_mesh(MeshConfig(pp=schedule.ranks, dp=8 // schedule.ranks, fsdp=1))
    count = schedule.microbatches
    got = run(schedule, mesh, *make_params(layers), microbatches(count, rows), **options)
    assert_equal(got, expected(layers, count, rows))


def test_the_backward_pass_is_cut_in_two_only_for_a_schedule_that_splits_it(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("cut in two")

    monkeypatch.setattr(layer_loop, "SplitBackward", refuse)
    mesh = make_mesh(MeshConfig(pp=2, fsdp=1), jax.devices()[:2])
    inputs = mesh, *make_params(2), microbatches(2, 1)
    run(build("1f1b", 2, 2), *inputs)
    with pytest.raises(AssertionError, match="cut in two"):
        run(build("zb_h1", 2, 2), *inputs)


@pytest.mark.parametrize(("virtual", "placement"), [(2, "loop"), (2, "v")])
def test_a_table_of_forward_operations_gives_the_loss(virtual, placement):
    mesh = make_mesh(MeshConfig(pp=4, dp=2, fsdp=1))
    schedule = forward_only(4, virtual, placement, 8)
    loss, metric = run(schedule, mesh, *make_params(8), microbatches(8, 4))
    np.testing.assert_allclose(loss, expected(8, 8, 4)[0], rtol=1e-5)
    assert 0 < metric < loss


def test_a_masked_tick_of_the_head_adds_nothing_not_even_nan():
    """Idle ticks too few for a branch, too many for a scan each: the head runs in them, on zeros."""
    table = build("1f1b", 1, 64)
    ticks = [
        row for t, row in enumerate(table.ticks) for row in ([row, ({},)] if t % 12 == 6 else [row])
    ]
    gaps = table.with_ticks(ticks).check()
    [segment] = assemble(gaps).segments
    assert 0.9 <= assemble(gaps).every["head"].mean() < 1 and segment.kinds == {"F", "B"}

    def normed(shared, y, batch):
        return head(shared, y * lax.rsqrt(jnp.sum(y * y, -1, keepdims=True)), batch)

    mesh = make_mesh(MeshConfig(pp=1, dp=2, fsdp=1), jax.devices()[:2])
    stages = dataclasses.replace(STAGES, head=normed)
    inputs = (mesh, *make_params(2), microbatches(64, 2))
    want = run(table, *inputs, stages=stages)
    assert np.isfinite(want[0])
    assert_equal(run(gaps, *inputs, stages=stages), want)


def test_idle_ticks_of_layers_add_nothing_not_even_nan():
    """Where nothing has been stored yet the norm divides by zero, forward, backward and for the weights."""

    def no_eps(p, x, context):
        # As `layer`, whose eps is too small to be seen in a comparison to 1e-5.
        h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * p["scale"][None, None] * context
        y = x + jax.nn.silu(h @ p["w_in"]) @ p["w_out"]
        return y, AUX * jnp.mean(y * y)

    mesh = make_mesh(MeshConfig(pp=2, fsdp=1), jax.devices()[:2])
    stages = dataclasses.replace(STAGES, layer=no_eps)
    got = run(build("zb_h1", 2, 4), mesh, *make_params(4), microbatches(4, 2), stages=stages)
    assert_equal(got, expected(4, 4, 2))


def test_padding_may_stand_on_every_stage_and_does_not_run():
    """Gradients are this device's sums whatever the parameters are typed as: the tests above type them as equal."""
    check(build("1f1b", 2, 4), 4, order=(0, 1, None, 2, 3, None), typed=("dp",))


def whole_table(shared):
    return {"table": lax.all_gather(shared["table"], "pp", tiled=True)}


@pytest.mark.parametrize(
    ("look_up", "parts"),
    [
        # As on one device: all ranks return the whole, whose type differs between them.
        (lambda shared, batch: whole_table(shared)["table"][batch["tokens"]], False),
        (lambda shared, batch: lax.psum(embed(shared, batch), "pp"), None),
    ],
    ids=["typed as differing", "typed as equal"],
)
def test_an_embedding_that_all_ranks_return_whole_counts_once(look_up, parts):
    stages = dataclasses.replace(STAGES, embed=look_up, embed_parts=parts)
    check(build("1f1b", 2, 4), 4, stages=stages)
