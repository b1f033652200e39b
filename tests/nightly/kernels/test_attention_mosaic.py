"""The attention kernel's blocks in the GPU interpreter, and what H100s run of a ring over documents."""

import functools
import re

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.attention_blocks import (
    KERNEL,
    LLAMA3_8B,
    ROUNDED,
    case,
    check,
    check_joined,
    compile_attention,
    joined,
)
from tests.attention_oracle import Dense
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.kernels.attention_mask import BlockMask, Scores
from ultrascale_jax.parallel.context.attention import context_attention


def test_the_kernels_blocks_join_to_the_whole_in_the_interpreter(interpreted):
    blocks = case((1, 384, 1, 1, 64), (100, 130, 154), window=90, scale=0.2)
    passes = [functools.partial(run, scores=Scores(scale=0.2)) for run in KERNEL]
    got = interpreted(joined(blocks, *passes, 128), *blocks.arrays)
    check_joined(got, blocks.want, ROUNDED)


def test_the_kernel_reads_no_keys_that_no_query_of_a_tile_sees(interpreted):
    tokens = 384
    skipped = case((1, tokens, 1, 1, 64), (256, 128))
    (q, k, v, dout), ids, _, want = skipped
    # All but the last tile of queries, and what only they see, is not there.
    k[:, :256] = v[:, :256] = np.nan
    index = np.arange(tokens)

    def run(q, k, v, dout):
        mask = BlockMask(positions=(index[256:], index), segment_ids=(ids[:, 256:], ids))
        forward, backward = KERNEL
        out, lse = forward(q, k, v, mask)
        return out, lse, *backward(q, k, v, out, lse, dout, mask)

    results = interpreted(run, q[:, 256:], k, v, dout[:, 256:])
    out, lse, dq, dk, dv = (np.asarray(x) for x in results)
    got = out, lse, dq, dk[:, 256:], dv[:, 256:]
    rows = {name: getattr(want, name)[:, 256:] for name in ("out", "dq", "dk", "dv")}
    last = Dense(lse=want.lse[:, :, 256:], **rows)
    check(got, last, ROUNDED)
    np.testing.assert_array_equal(np.stack([dk, dv])[:, :, :256].astype(np.float32), 0)


def test_on_h100s_a_ring_over_documents_makes_no_mask(h100s):
    tokens, context = 2048, ContextConfig(strategy="zigzag")

    def run(q, k, v, ids):
        return context_attention(
            context, q, k, v, axis="cp", segment_ids=ids, implementation="mosaic"
        )[0]

    two = jax.sharding.Mesh(h100s.devices[:2], ("cp",), axis_types=(AxisType.Explicit,))
    program = compile_attention(two, run, P(None, "cp"), LLAMA3_8B, 2 * tokens, 1)
    text = program.as_text()
    # Three for each block: the own one, and two chunks' with those of the other rank.
    assert len(re.findall("custom_call_target=.mosaic", text)) == 9
    assert not re.search(rf"{tokens},{tokens}|{tokens // 2},{tokens // 2}", text)
