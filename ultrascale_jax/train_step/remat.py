"""Choose what one layer keeps for its backward pass (playbook: activation recomputation).

none        everything, except gathered parameters: ZeRO-3 gathers them again
full        the input of the layer
selective   the tensors of a block that have a name: no attention scores, no float32 insides of norms and rotary
            embeddings (Megatron's selective, arXiv 2205.05198); flash attention does not run again
dots        the results of matmuls with parameters, or what alone is read of them (`name_product`), of routed experts
            only the sum that returns to a token; and attention's, which does not run again: cuDNN's residuals,
            or what blocks or documents are joined to
Keep        its tensors alone, in the memory of the device or of the host; the layer's input in any case
Split       one of these for the first layers, and another for the others

Where a row of a stack is a group of layers, each keeps its input too, and is recomputed when its turn comes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from ultrascale_jax.config import (
    REMAT_NAMES,
    Config,
    LayerRemat,
    by_layer,
    policies,
    remat_names,
    with_changes,
)
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.residuals import ATTENTION_RESIDUAL
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layer_group import GROUP_INPUT
from ultrascale_jax.models.stack import Recomputation
from ultrascale_jax.sharding.primitives import PRODUCT, is_gathered_param


def by_number(cfg: Config) -> Callable[[int], Recomputation]:
    """Return what `train.remat` asks for, as a function of a layer's number in a model without a pipeline."""
    parts = by_layer(cfg.train.remat, cfg.model.num_layers)
    layers = [
        recomputation
        for policy, count in parts
        for recomputation in [of_policy(cfg, policy)] * count
    ]
    return layers.__getitem__


def of_last_layer(cfg: Config) -> Recomputation:
    """Return what `train.remat` asks for in the last layer."""
    return of_policy(cfg, policies(cfg.train.remat)[-1])


def of_policy(cfg: Config, remat: LayerRemat) -> Recomputation:
    """Return what a policy of a layer asks for."""
    lowering = Lowering.of(with_changes(cfg, mesh=cfg.mesh, remat=remat))
    each = cfg.model.layer_group > 1 and remat != "none"
    policy = _policy(remat, lowering)
    if each:
        policy = functools.partial(_keep_inputs_too, policy)

    def wrap(layer: Callable) -> Callable:
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def adapt(inputs: LayerInputs) -> LayerInputs:
        return dataclasses.replace(
            inputs, recompute=remat == "selective", recompute_each=each, lowering=lowering
        )

    return Recomputation(wrap, remat_names(remat)[1], adapt)


def _policy(remat: LayerRemat, lowering: Lowering) -> Callable[..., bool]:
    """Return the policy of `jax.checkpoint`."""
    named, (saved, offloaded) = jax.checkpoint_policies, remat_names(remat)
    if remat == "none":
        return _keep_all_but_gathered
    if remat == "selective":
        return named.save_only_these_names(*set(REMAT_NAMES) - {"layer_input"})
    if remat == "full":
        return named.nothing_saveable
    if remat == "dots":
        return named.save_only_these_names(PRODUCT, ATTENTION_RESIDUAL)
    if lowering.gathers_ahead:  # whose loop takes them to the host, while the next layer computes
        return named.save_only_these_names(*saved, *offloaded)
    return named.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _keep_inputs_too(policy: Callable, primitive, *inputs, **params) -> Any:
    """Keep what `policy` says, and the inputs of the layers of a group."""
    return params.get("name") == GROUP_INPUT or policy(primitive, *inputs, **params)


def _keep_all_but_gathered(primitive, *inputs, **params) -> bool:
    """Keep every value except parameters gathered over the ZeRO axes."""
    return primitive.name == "dot_general" or not is_gathered_param(primitive, *inputs, **params)
