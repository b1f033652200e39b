"""Find the first place where a step is not finite: a parameter, half a layer, the loss, or a gradient.

One more forward pass looks at the residual stream of each layer; where that is finite, the gradients are computed anew.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ultrascale_jax.checkpoint.mesh_independent import gather_stages
from ultrascale_jax.config import Config
from ultrascale_jax.models.fp8 import is_variable
from ultrascale_jax.models.layer_group import with_inputs
from ultrascale_jax.models.stack import Segment, segments
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.primitives import reshard
from ultrascale_jax.train_step.objective import Batch
from ultrascale_jax.train_step.precision import fp8_of, layer_inputs
from ultrascale_jax.train_step.state import TrainState
from ultrascale_jax.train_step.step import compiled, gradients, position_weight, split

HALVES = ("attention", "feed-forward layer")
"""Halves of a layer, after each of which the residual stream is looked at."""

NAMED = 3
"""Parameters that are named at most."""


def find_nonfinite(cfg: Config, state: TrainState, batch: Batch) -> str:
    """Describe the first place where a step on this batch is not finite. All processes call it in the mesh.

    Args:
      cfg: the run's, as `make_train_step` takes it.
      state: before the step, which is also that after it, for it was skipped.
      batch: of the step.
    """
    bad = [name for name, finite in jax.jit(_by_name)(state.model).items() if not finite.all()]
    if bad:
        return f"in the parameters {_listed(bad)}, before the step"
    forward = compiled(cfg, lambda model, batch: _forward(cfg, model, batch))
    embedding, layers_L2, loss = jax.device_get(forward(gather_stages(state.model), batch))
    if not embedding:
        return "in the embeddings of its tokens"
    if not layers_L2.all():
        layer, half = np.argwhere(~layers_L2)[0]
        return f"after the {HALVES[half]} of layer {layer}, from 0"
    if not loss:
        return "in the head or the loss; each layer's output is finite"
    backward = compiled(cfg, lambda state, batch: _backward(cfg, state, batch))
    # Rows of an embedding are split over devices, of other processes too.
    finite = multihost_utils.process_allgather(backward(state, batch), tiled=True)
    return _first_gradient(state.model, finite)


def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x))


def _by_name(model: Transformer) -> dict[str, jax.Array]:
    """Return whether each row of each parameter is finite, by its dotted path; a row of a stack is a layer.

    Frozen parameters have no gradient.
    """
    variables = jax.tree.leaves_with_path(model, is_leaf=is_variable)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): jnp.all(
            jnp.isfinite(variable.get_value()), axis=tuple(range(1, variable.get_value().ndim))
        )
        for path, variable in variables
        if variable.get_value() is not None
    }


def _backward(cfg: Config, state: TrainState, batch: Batch) -> dict[str, jax.Array]:
    """Return whether the norm of each row of a parameter's gradient is finite, by its dotted path."""
    weight = position_weight(state, batch)
    grads, _ = gradients(cfg, state.params, batch, weight, state.frozen, state.reference)
    return _by_name(
        jax.tree.map(lambda grad: jnp.sum(jnp.square(grad), axis=tuple(range(1, grad.ndim))), grads)
    )


def _first_gradient(model: Transformer, finite: dict[str, np.ndarray]) -> str:
    """Return the place of the first gradients in the order of the backward pass that are not finite."""
    bad: dict[int, list[str]] = {}
    for name, rows in finite.items():
        part, _, path = name.partition(".")
        if part != "stacks":
            layers = [] if rows.all() else [-1 if part == "embed" else len(model.rows)]
        else:
            stack, *inner = path.split(".")
            order, depth = model.orders[int(stack)], int(inner[1]) if inner[0] == "layers" else 0
            # No padding is among them.
            layers = [(order[row] or 0) + depth for row in np.flatnonzero(~rows)]
        for layer in layers:
            bad.setdefault(layer, []).append(name)
    if not bad:
        return "nowhere when it was computed again"
    layer = max(bad)
    where = f", layer {layer} from 0" if 0 <= layer < len(model.rows) else ""
    return f"in the gradients of {_listed(bad[layer])}{where}"


def _listed(names: Sequence[str]) -> str:
    count = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *count])


def _forward(
    cfg: Config, model: Transformer, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether the embedding is finite, the stream after both halves of each layer `[L, 2]`, and the loss."""
    model = model.without_mtp()
    fp8 = fp8_of(cfg, model)

    def run_micro_batch(carry, micro_batch):
        inputs = layer_inputs(cfg, micro_batch, fp8)
        x_BRD = model.embedding(reshard("BT->BT", micro_batch["tokens"]), inputs.dtype)
        embedding, layers = _is_finite(x_BRD), []
        for i, (stack, numbers) in enumerate(zip(model.stacks, model.cfg.stacks, strict=True)):
            for segment in segments(stack, numbers, inputs.of_stack(i)):
                x_BRD, finite_L2 = _run(segment, x_BRD)
                layers.append(finite_L2)
        targets_BT = micro_batch["targets"]
        weight = jnp.float32(1 / targets_BT.size)
        loss = model.loss(model.normed(x_BRD), targets_BT, weight, dtype=inputs.dtype)[0]
        return carry, (embedding, jnp.concatenate(layers), jnp.isfinite(loss))

    _, finite = jax.lax.scan(run_micro_batch, None, split(batch, cfg.train.microbatches))
    return jax.tree.map(lambda flags_M: jnp.all(flags_M, axis=0), finite)


def _run(segment: Segment, x_BRD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run the layers of a chunk; return the residual stream, and whether it is finite after each half `[L, 2]`."""

    def run_layer(x_BRD, row):
        block, layer_row = row
        finite = []
        for layer, inputs in with_inputs(block, segment.inputs.of_layer(layer_row)):
            x_BRD, _, feed_forward, _ = layer.gather_params(inputs).attend(x_BRD, inputs)
            attended = _is_finite(x_BRD)
            x_BRD, *_ = layer.feed(x_BRD, feed_forward, inputs.moe)
            finite.append(jnp.stack([attended, _is_finite(x_BRD)]))
        return x_BRD, jnp.stack(finite)

    x_BRD, finite_LG2 = jax.lax.scan(run_layer, x_BRD, (segment.block, segment.rows))
    return x_BRD, finite_LG2.reshape(-1, 2)
