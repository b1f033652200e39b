"""Choose what one layer keeps for its backward pass (playbook: activation recomputation).

none        everything, except gathered parameters: ZeRO-3 gathers them again
full        the input of the layer
selective   the tensors of a block that have a name: no attention scores, no float32 insides of norms and rotary
            embeddings (Megatron's selective, arXiv 2205.05198); flash attention does not run again
dots        the results of matmuls with parameters, or what alone is read of them (`name_product`), of routed experts
            only the sum that returns to a token; and those of attention, which does not run again: cuDNN's residuals,
            or what blocks or documents are joined to
Keep        its tensors alone, in the memory of the device or of the host; the layer's input in any case
"""

from collections.abc import Callable

import jax

from ultrascale_jax.config import REMAT_NAMES, Config, remat_names
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.residuals import ATTENTION_RESIDUAL
from ultrascale_jax.sharding.primitives import PRODUCT, is_gathered_param


def remat(cfg: Config) -> Callable[[Callable], Callable]:
    """Return the wrapper of one layer's function that `train.remat` asks for."""
    policies = jax.checkpoint_policies
    name, (saved, offloaded) = cfg.train.remat, remat_names(cfg.train.remat)
    if name == "none":
        policy = _keep_all_but_gathered
    elif name == "selective":
        policy = policies.save_only_these_names(*set(REMAT_NAMES) - {"layer_input"})
    elif name == "full":
        policy = policies.nothing_saveable
    elif name == "dots":
        policy = policies.save_only_these_names(PRODUCT, ATTENTION_RESIDUAL)
    elif Lowering.of(
        cfg
    ).gathers_ahead:  # whose loop takes them to the host, while the next layer computes
        policy = policies.save_only_these_names(*saved, *offloaded)
    else:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(saved),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _keep_all_but_gathered(primitive, *inputs, **params) -> bool:
    """Keep every value except parameters gathered over the ZeRO axes."""
    return primitive.name == "dot_general" or not is_gathered_param(primitive, *inputs, **params)
