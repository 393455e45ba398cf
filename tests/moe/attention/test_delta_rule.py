"""The gated delta rule chunk by chunk equals it token by token, values and gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from largest import assert_trees_close_by_largest
from programs import jit
from tiers import full_but

from moe.attention import delta as rule
from moe.attention.delta import Tokens, gated_delta_rule

ROWS, KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 3, 5, 4


def inputs(time, seed=0):
    """Keys and queries of length 1; decays from nearly none to nearly all; sequences that begin
    anywhere, some of them twice in a chunk; and tokens that must change nothing."""
    draw = np.random.default_rng(seed)
    values = ROWS, time, KEY_HEADS, GROUP

    def unit(*shape):
        x = draw.normal(size=shape)
        return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), jnp.float32)

    padding = draw.random((ROWS, time)) < 0.2
    log_decay = np.where(padding[..., None, None], 0.0, -(10 ** draw.uniform(-3, 1.5, values)))
    strength = np.where(padding[..., None, None], 0.0, draw.random(values))
    starts = (draw.random((ROWS, time)) < 0.1) & ~padding
    tokens = Tokens(
        query=unit(ROWS, time, KEY_HEADS, KEY_DIM),
        key=unit(ROWS, time, KEY_HEADS, KEY_DIM),
        value=jnp.asarray(draw.normal(size=(*values, VALUE_DIM)), jnp.float32),
        log_decay=jnp.asarray(log_decay, jnp.float32),
        strength=jnp.asarray(strength, jnp.float32),
        starts=jnp.asarray(starts),
    )
    state = draw.normal(size=(ROWS, KEY_HEADS * GROUP, KEY_DIM, VALUE_DIM))
    return tokens, jnp.asarray(state, jnp.float32)


def by_hand(tokens, state):
    """The rule in float64 loops over heads and tokens."""
    tokens = Tokens(*(np.asarray(x, np.float64) for x in tokens))
    state, read = np.array(state, np.float64), np.zeros((*tokens.starts.shape, 6, VALUE_DIM))
    for row, time in np.ndindex(*tokens.starts.shape):
        for head in range(KEY_HEADS * GROUP):
            of, group = divmod(head, GROUP)
            matrix = state[row, head] * np.exp(tokens.log_decay[row, time, of, group])
            matrix = np.zeros_like(matrix) if tokens.starts[row, time] else matrix
            key = tokens.key[row, time, of]
            wrong = tokens.value[row, time, of, group] - key @ matrix
            matrix += tokens.strength[row, time, of, group] * np.outer(key, wrong)
            state[row, head] = matrix
            read[row, time, head] = tokens.query[row, time, of] @ matrix
    return read, state


@pytest.mark.parametrize("time", full_but([1, 8, 13], 13))
def test_chunks_equal_tokens_and_both_a_loop(time, monkeypatch):
    monkeypatch.setattr(rule, "MAX_CHUNK_TOKENS", 4)
    tokens, state = inputs(time)
    weighed = np.random.default_rng(1).normal(size=(ROWS, time, KEY_HEADS * GROUP, VALUE_DIM))

    def total(floats, starts, state, name):
        read, after = gated_delta_rule(Tokens(*floats, starts), state, name)
        return jnp.sum(read * weighed) + jnp.sum(after**2), (read, after)

    run = jit(jax.value_and_grad(total, argnums=(0, 2), has_aux=True), static_argnums=3)
    (_, found), gradients = run(tuple(tokens[:-1]), tokens.starts, state, "chunked")
    (_, plain), expected = run(tuple(tokens[:-1]), tokens.starts, state, "recurrent")
    # float32, in sums of other order; of values about 1.
    for one, other in ((found, plain), (plain, by_hand(tokens, state))):
        chex.assert_trees_all_close(one, other, rtol=1e-7, atol=2e-6)
    assert_trees_close_by_largest(gradients, expected, rtol=1e-7, of_largest=5e-6)
    assert all(np.max(np.abs(x)) > 0.01 for x in jax.tree.leaves(expected))


@pytest.mark.slow
def test_decay_that_leaves_nothing_gives_no_nan():
    """Its exponential is 0; above the diagonal the exponentials would be infinite."""
    tokens, state = inputs(7)
    tokens = tokens._replace(log_decay=jnp.full_like(tokens.log_decay, -300.0))

    def total(log_decay):
        read, after = gated_delta_rule(tokens._replace(log_decay=log_decay), state)
        return jnp.sum(read) + jnp.sum(after)

    value, gradient = jit(jax.value_and_grad(total))(tokens.log_decay)
    chex.assert_tree_all_finite((value, gradient))


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"implementation='scan' is not known: choose among chunk"):
        gated_delta_rule(*inputs(1), implementation="scan")
