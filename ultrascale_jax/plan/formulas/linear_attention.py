"""Costs of a layer of linear attention by either rule, on one GPU; no JAX.

`parallel/gated_delta_rule.py` has the program: it computes chunks of tokens by small products, walks over blocks of
chunks, and keeps the states between blocks. Memory traffic bounds it in XLA's programs; no GPU has timed it.
"""

from typing import NamedTuple

from ultrascale_jax.config.model import Rule
from ultrascale_jax.config.remat import keeps
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.workload import Run, group

BLOCK = 1024
"""Tokens between two states that are kept."""

BLOCK_BYTES: dict[Rule, float] = {"delta": 0.65, "mamba2": 0.2}
"""Bytes that the backward pass of a block has in hand for each of its tokens and each number of a state."""

RULE_BYTES: dict[Rule, tuple[float, float]] = {"delta": (3.0, 6.7), "mamba2": (1.0, 2.3)}
"""Memory traffic of the rule for the same, forward and backward in bfloat16: of a simulated program for H100s."""

CROSSING: dict[Rule, float] = {"delta": 1.2, "mamba2": 1.2}
"""Share of that where cp splits the sequence, in the same simulation."""


class Sizes(NamedTuple):
    """Numbers of values in the tensors of one layer on one GPU."""

    key: float
    """Queries, or keys."""
    value: float
    """Values, gates, or results."""
    heads: float
    """One for each token and head of values: decays, or strengths."""
    states: float
    """States that are kept, float32."""


def sizes_of(run: Run) -> Sizes:
    """Return the sizes of a layer of linear attention; zeros without."""
    linear = run.shape.linear
    if linear is None:
        return Sizes(0, 0, 0, 0)
    tokens = run.tokens / run.mesh.tensor
    heads = tokens * linear.value_heads
    key, value = tokens * run.shape.linear_keys(run.mesh.tensor), heads * linear.value_dim
    return Sizes(key, value, heads, heads * linear.key_dim * linear.value_dim / BLOCK)


def pieces_of(run: Run) -> int:
    """Count the chunks of a sequence that a rank of cp has, which the rule computes in parallel."""
    return run.context.chunks if run.ring[0] > 1 else 1


def named_bytes(run: Run, width: int) -> dict[str, float]:
    """Count the bytes of the layer's tensors that have a name, except the tensors of its norm and its output.

    XLA copies the stacks of values and gates before the backward pass, to have the tokens last, unless attention beside
    the layer keeps them where they are.
    """
    key, value, _, states = sizes_of(run)
    copies = 1 if _beside_attention(run) else 2
    return {
        "q": width * key,
        "k": width * key,
        "v": copies * width * value,
        "attn_gate": copies * width * value,
        "attn_core": width * value + 4 * states,
    }


def _beside_attention(run: Run) -> bool:
    return run.shape.linear is not None and run.shape.linear.beside_attention


def unnamed_bytes(run: Run, width: int) -> float:
    """Count the bytes of all other tensors that the layer keeps where nothing is recomputed.

    The inputs of the rule; decays and strengths; the insides of its norm and of the gate in float32, and of Mamba-2 the
    sum with the skipped values.
    """
    key, value, heads, _ = sizes_of(run)
    linear = run.shape.linear
    mamba = linear is not None and linear.rule == "mamba2" and linear.norm
    return width * (2 * key + value) + 24 * heads + (28 if mamba else 20) * value


def backward_bytes(run: Run, width: int) -> float:
    """Count the bytes that the backward pass of the layer holds in addition to its input and output.

    Products with parameters; what the rule reads, as it is and by block, and its gradients; the result, its gradient,
    and the norm after it in float32; of one block the states of its chunks, their gradients and products. Of Mamba-2
    also the products with parameters that are computed again, in that other layout; beside attention, where nothing is
    copied, the insides of its norm.
    """
    linear = run.shape.linear
    if linear is None:
        return 0.0
    key, value, _, _ = sizes_of(run)
    tokens = width * (4 * (2 * key + value) + 3 * value) + 8 * value
    if linear.beside_attention:
        tokens += 8 * value * linear.norm
    elif linear.rule == "mamba2" and not keeps(run.policy, "v"):
        tokens += sum(named_bytes(run, width).values())
    pieces = pieces_of(run)
    length = pieces * min(BLOCK, run.seq_len // run.mesh.cp // pieces)
    heads = run.sequences * linear.value_heads / run.mesh.tensor
    return tokens + BLOCK_BYTES[linear.rule] * heads * length * linear.key_dim * linear.value_dim


def seconds(run: Run, gpu: Gpu) -> tuple[float, float]:
    """Time the rule and the convolutions, forward and backward, without communication."""
    linear = run.shape.linear
    if linear is None:
        return 0.0, 0.0
    key, value, heads, _ = sizes_of(run)
    width = 4 if run.precision == "fp32" else 2
    state = heads * linear.key_dim * linear.value_dim * width / 2
    state *= CROSSING[linear.rule] if run.mesh.cp > 1 else 1
    rule = (size * state for size in RULE_BYTES[linear.rule])
    convolved = 4 * width * (2 * key + value)
    forward, backward = (costs.memory_seconds(gpu, size + convolved) for size in rule)
    return forward, backward + costs.memory_seconds(gpu, convolved)


def exposed_seconds(run: Run, cluster: Cluster) -> float:
    """Time one pass' all-gather of states over cp, which nothing hides."""
    linear, cp = run.shape.linear, run.mesh.cp
    if linear is None or cp == 1:
        return 0.0
    pieces = pieces_of(run)
    heads = run.sequences * linear.value_heads / run.mesh.tensor
    columns = linear.value_dim + (linear.key_dim if linear.rule == "delta" else 1)
    state = linear.key_dim * columns
    ranks = group(run.mesh, ("cp",), cluster.gpus_per_node)
    return costs.collective_seconds(cluster, "all-gather", 4.0 * cp * pieces * heads * state, ranks)
