"""The gated delta rule beside a token-by-token oracle in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.delta_oracle import oracle, random_arrays, relative_errors
from ultrascale_jax.config import ContextConfig, UserError
from ultrascale_jax.parallel.gated_delta_rule import (
    CHUNK,
    Layout,
    gated_delta_rule,
    gated_delta_step,
)

TOKENS = 1100  # two blocks, and the last chunk is not full


@functools.partial(jax.jit, static_argnums=(3, 4))
def outputs_and_gradients(arrays, segment_ids, cotangent, chunk, delta):
    rule = functools.partial(gated_delta_rule, chunk=chunk, delta=delta)
    out, pull_back = jax.vjp(lambda *x: rule(*x, segment_ids), *arrays)
    return out, pull_back(cotangent)


def check(arrays, segment_ids, chunk=CHUNK, delta=True):
    cotangent = np.random.default_rng(1).standard_normal(arrays[2].shape).astype(np.float32)
    got = outputs_and_gradients(arrays, segment_ids, cotangent, chunk, delta)
    assert max(relative_errors(got, oracle(arrays, segment_ids, cotangent, delta))) < 1e-5


def draw(decay=0.1, **changed):
    """Queries, keys, values, logarithms of decays and betas; `changed` maps a name to a change of its array."""
    arrays = dict(zip(("q", "k", "v", "g", "beta"), arrays_of(decay), strict=True))
    for name, change in changed.items():
        arrays[name] = change(arrays[name]).astype(np.float32)
    return list(arrays.values())


def arrays_of(decay):
    return random_arrays(0, B=2, T=TOKENS, K=1, N=2, H=16, W=8, decay=decay)


def three_keys(k):
    """Each of three keys five times, again and again: inverses by powers of matrices lose all digits of such."""
    return k[:, np.arange(TOKENS) // 5 % 3]


def some_forget_all(g):
    return np.where(np.random.default_rng(2).uniform(size=g.shape) < 0.1, -80, g)


def documents(borders):
    return np.cumsum(np.broadcast_to(borders, (2, TOKENS)), axis=1).astype(np.int32)


ONE_DOCUMENT = documents(False)
PLACES = np.arange(TOKENS)


@pytest.mark.parametrize(
    ("arrays", "segment_ids"),
    [
        (draw(), ONE_DOCUMENT),
        (draw(decay=1e-3), ONE_DOCUMENT),
        (draw(g=np.zeros_like, beta=np.ones_like, k=three_keys), ONE_DOCUMENT),
        (draw(g=some_forget_all, decay=0.01), ONE_DOCUMENT),
        (draw(), documents(np.random.default_rng(3).uniform(size=(2, TOKENS)) < 0.1)),
        (draw(decay=0.01), documents(PLACES % CHUNK == 0)),
        (draw(decay=0.01), documents(PLACES % 63 == 0)),
    ],
    ids=["random", "long_memory", "repeated_keys", "forgetting", "short", "chunks", "drifting"],
)
def test_outputs_and_gradients_equal_the_oracle(arrays, segment_ids):
    check(arrays, segment_ids)


@pytest.mark.parametrize(
    ("arrays", "segment_ids"),
    [
        (draw(decay=1e-3), ONE_DOCUMENT),
        (
            draw(g=some_forget_all, decay=0.01, beta=lambda beta: 8 * beta),
            documents(PLACES % 63 == 0),
        ),
    ],
    ids=["long_memory", "forgetting"],
)
def test_without_the_delta_tokens_add_to_the_state(arrays, segment_ids):
    check(arrays, segment_ids, delta=False)


def test_another_chunk_and_a_sequence_of_one_document():
    check([x[:, :70] for x in draw()], None, chunk=4)


@pytest.mark.parametrize("delta", [True, False])
def test_steps_continue_the_state_and_padding_leaves_it(delta):
    *arrays, g, beta = (x[:, :140] for x in draw())
    want = jax.jit(functools.partial(gated_delta_rule, delta=delta))(*arrays, g, beta)
    gates = [np.where(np.arange(140)[:, None] < 130, x, 0) for x in (g, beta)]
    step = jax.jit(functools.partial(gated_delta_step, delta=delta))
    state, out = step(jnp.zeros((2, 2, 16, 8)), *arrays, *gates)
    np.testing.assert_allclose(out[:, :130], want[:, :130], rtol=0, atol=1e-6)
    for t in range(130, 140):
        state, out = step(state, *(x[:, t : t + 1] for x in (*arrays, g, beta)))
        np.testing.assert_allclose(out[:, 0], want[:, t], rtol=0, atol=1e-6)


def test_bfloat16_keeps_states_in_float32():
    """Without decay an error of the state would grow with the number of tokens."""
    q, k, v, g, beta = draw(decay=1e-3)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = jax.jit(gated_delta_rule)(*rounded, g, beta)
    assert got.dtype == jnp.bfloat16
    exact = [np.asarray(x, np.float32) for x in rounded]
    want, _ = oracle([*exact, g, beta], None, np.ones_like(v))
    errors = np.abs(np.asarray(got, np.float64) - want).mean(axis=(0, 2, 3)) / np.abs(want).mean()
    assert errors[-100:].mean() < 2**-7


def test_a_rank_of_one_token_has_one_piece():
    zigzag = ContextConfig(strategy="zigzag")
    assert Layout.of(1, 64, 2, zigzag).order == ((0,), (1,))
    assert Layout.of(2, 64, 2, zigzag).order == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, g, b: (q, k, v, g[..., :1], b), "arrays="),
        (lambda q, k, v, g, b: (q, k.astype(jnp.bfloat16), v, g, b), "must be of one type"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        gated_delta_rule(*change(*map(jnp.asarray, draw())))
