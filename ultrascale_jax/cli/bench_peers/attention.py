"""Attention alone, over a mesh axis of size 1 and in the blocks that a zigzag ring has, beside cuDNN directly.

The arrays are one layer's, made once. One process has all the programs of a sequence length, since two that differ by a
hundredth have to meet the same clock (`turns.py`).
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ultrascale_jax import ring_attention, zigzag_attention
from ultrascale_jax.cli.bench_peers.contestant import Contestant, Program, require_gpu, serve
from ultrascale_jax.cli.bench_peers.turns import difference, normals, take_turns
from ultrascale_jax.kernels.attention import attention_backward, attention_forward
from ultrascale_jax.sharding.manual import smap

DIRECT = "jax.nn"
"""`jax.nn.dot_product_attention`: on a GPU cuDNN's forward and backward call and nothing else."""

RING = ("ring_attention", "zigzag_attention")

BLOCKS = ("one causal", "two halves")
"""`two halves`, T/2 queries with T/2 keys twice and no mask, is a step of the zigzag ring, with as many scores as one
causal block of T."""


def programs(spec: dict) -> tuple[Program, ...]:
    """In the order of their turns.

    Their products are over the scores that are seen: two forward, five backward, one of them the scores' again.
    """
    product = 2 * (spec["num_heads"] * spec["seq_len"] ** 2 // 2) * spec["head_dim"]
    works = {
        "forward": (2, (DIRECT, *RING)),
        "forward and backward": (7, (DIRECT, *RING)),
        "block, forward": (2, BLOCKS),
        "block, backward": (5, BLOCKS),
    }
    return tuple(
        Program(work, name, products * product)
        for work, (products, names) in works.items()
        for name in names
    )


def one_rank():
    """A mesh of one device with an automatic axis `cp`: no array gets a sharding, as where cuDNN is called directly."""
    return jax.make_mesh((1,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])


def functions(spec: dict) -> dict[Program, Callable]:
    """Each program's function on the current mesh, which has one axis `cp`.

    It takes q, k, v and the cotangent; a block's backward pass also `out` and `lse`.
    """
    implementation: Literal["cudnn", "xla"] = spec["implementation"]
    pieces = P(None, "cp")

    def over_one_rank(attend: Callable) -> Callable:
        def local(q, k, v):
            return attend(q, k, v, implementation=implementation)

        return smap(local, in_specs=(pieces,) * 3, out_specs=pieces, axes=("cp",))

    def direct(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    def forward(attend: Callable) -> Callable:
        return lambda q, k, v, dout: attend(q, k, v)

    def both(attend: Callable) -> Callable:
        def run(q, k, v, dout):
            out, pull_back = jax.vjp(attend, q, k, v)
            return out, *pull_back(dout)

        return run

    def block(q, k, v, dout):
        return attention_forward(q, k, v, causal=True, implementation=implementation)

    def block_backward(q, k, v, dout, out, lse):
        return attention_backward(
            q, k, v, out, lse, dout, causal=True, implementation=implementation
        )

    def halves(*pairs):
        return [
            attention_forward(q, k, v, implementation=implementation)
            for q, k, v, _ in zip(*pairs, strict=True)
        ]

    def halves_backward(*pairs):
        return [
            attention_backward(q, k, v, out, lse, dout, implementation=implementation)
            for q, k, v, dout, out, lse in zip(*pairs, strict=True)
        ]

    attends = direct, over_one_rank(ring_attention), over_one_rank(zigzag_attention)
    blocks = block, halves, block_backward, halves_backward
    runs = (*map(forward, attends), *map(both, attends), *blocks)
    return dict(zip(programs(spec), runs, strict=True))


def arrays(spec: dict) -> dict[Program, tuple]:
    """Each program's arguments; halves are pairs of arrays, so that no program has to cut any."""
    T, H, heads = spec["seq_len"], spec["head_dim"], (spec["num_heads"], spec["num_kv_heads"])

    @jax.jit
    def make():
        whole = normals(jax.random.key(0), *((1, T, heads[i], H) for i in (0, 1, 1, 0)))
        halves = [tuple(jnp.split(x, 2, axis=1)) for x in whole]
        return whole, halves

    @functools.partial(jax.jit, static_argnames="causal")
    def attend(q, k, v, causal):
        return attention_forward(q, k, v, causal=causal, implementation=spec["implementation"])

    whole, halves = make()
    done = attend(*whole[:3], causal=True)
    parts = [attend(*qkv, causal=False) for qkv in zip(*halves[:3], strict=True)]
    given = {"one causal": (*whole, *done), "two halves": (*halves, *zip(*parts, strict=True))}
    return {
        p: given.get(p.contestant, tuple(whole))[: 6 if p.work == "block, backward" else 4]
        for p in programs(spec)
    }


def make(spec: dict) -> Contestant:
    require_gpu(spec)
    jax.set_mesh(one_rank())

    def notes(outputs: dict[Program, tuple], _) -> dict[str, str]:
        results = {p.contestant: x for p, x in outputs.items() if p.work == "forward and backward"}
        return {f"{name} differs by": difference(results[name], results[DIRECT]) for name in RING}

    return take_turns(functions(spec), arrays(spec), spec["calls"], notes)


if __name__ == "__main__":
    serve(make)
