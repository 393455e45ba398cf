"""Sequences in padded, shared and packed rows read what each reads by itself, in a plain loop."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit, mesh_of
from tiers import full_but

from moe.architecture.attention import GatedDeltaNet
from moe.attention.delta import Mixed, run_sections
from moe.config import Model, ModelConfig
from moe.tokens.packing import pack_rows, pack_segments, pack_shared_prompts

DELTA = GatedDeltaNet((0,), 2, 4, key_head_dim=3, value_head_dim=5, conv_width=4)
TIME, PROMPT, COPIES = 9, 5, 2
ONE = Model(ModelConfig(2), mesh_of("dp1"))
FILTERS = np.random.default_rng(7).normal(size=(2, DELTA.content_dim, 4))


def padded():
    """Sequences that begin and end anywhere, with holes, one of a token and one of none."""
    valid = np.random.default_rng(3).random((4, TIME)) < 0.7
    valid[1], valid[2] = np.arange(TIME) == 6, False
    return valid


def packed():
    """Three sequences of two rows, two of which take turns, and padding between."""
    return np.array([[0, 5, 2, 5, 2, 2, 0, 5, 0], [3, 3, 3, 3, 3, 3, 3, 3, 3]])


def shared():
    """Prompts padded on the left and shorter than the filters, responses on the right."""
    column, prompts = np.arange(TIME)[None], np.repeat([2, 5], COPIES)[:, None]
    responses = np.array([4, 1, 3, 2])[:, None]
    return (column >= PROMPT - prompts) & (column < PROMPT + responses)


def rows_mask(valid):
    return pack_rows(jnp.zeros(valid.shape, int), jnp.asarray(valid), ONE).mask


def by_rows():
    valid = padded()
    sequences = [np.flatnonzero(own) + row * TIME for row, own in enumerate(valid)]
    return rows_mask(valid), valid.size, sequences


def by_segments():
    segments = packed()
    tokens = jnp.zeros(segments.shape, int)
    mask = pack_segments(tokens, jnp.asarray(segments), 5, ONE).mask
    flat = segments.reshape(-1)
    return mask, flat.size, [np.flatnonzero(flat == number) for number in (2, 3, 5)]


def by_prompts():
    valid = shared()
    tokens = jnp.zeros(valid.shape, int)
    mask = pack_shared_prompts(tokens, jnp.asarray(valid), PROMPT, COPIES, ONE).mask
    prompts = np.arange(2 * PROMPT).reshape(2, PROMPT)
    responses = 2 * PROMPT + np.arange(4 * (TIME - PROMPT)).reshape(4, -1)
    places = np.concatenate([np.repeat(prompts, COPIES, axis=0), responses], axis=1)
    return mask, 2 * PROMPT + responses.size, [p[v] for p, v in zip(places, valid, strict=True)]


def inputs(number):
    draw = np.random.default_rng(number)
    heads = DELTA.num_key_heads, DELTA.values_per_key
    return Mixed(
        draw.normal(size=(number, heads[0], DELTA.content_dim)),
        -draw.random((number, *heads)),
        draw.random((number, *heads)),
    )


def alone(mixed, places):
    """What the tokens of one sequence read, by loops in float64."""
    content, width = np.zeros((len(places), *mixed.content.shape[1:])), DELTA.key_head_dim
    for token in range(len(places)):
        for back in range(min(4, token + 1)):
            content[token] += FILTERS[..., 3 - back] * mixed.content[places[token - back]]
    content /= 1 + np.exp(-content)
    found = np.zeros((len(places), 4, DELTA.value_head_dim))
    for head in range(4):
        key_head, group = divmod(head, 2)
        state = np.zeros((width, DELTA.value_head_dim))
        for token, place in enumerate(places):
            query, key, values = np.split(content[token, key_head], [width, 2 * width])
            query, key = (x / np.sqrt(np.sum(x * x) + 1e-6) for x in (query, key))
            value = values.reshape(2, -1)[group]
            state = state * np.exp(mixed.log_decay[place, key_head, group])
            strength = mixed.strength[place, key_head, group]
            state = state + strength * np.outer(key, value - key @ state)
            found[token, head] = query @ state / np.sqrt(width)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", full_but([by_rows, by_segments, by_prompts], by_segments))
def test_delta_sequence_equals_plain_loop(case):
    mask, number, sequences = case()
    mixed, tokens = inputs(number), np.concatenate(sequences)
    valid = np.isin(np.arange(number), tokens)

    def total(mixed):
        read, after = run_sections(mask, DELTA, mixed, jnp.asarray(FILTERS, jnp.float32))
        counted = jnp.where(valid[:, None, None], read, 0.0)
        return jnp.sum(counted**2), (read, after)

    given = Mixed(*(jnp.asarray(x, jnp.float32) for x in mixed))
    run = jit(jax.value_and_grad(total, has_aux=True))
    (_, (read, after)), gradients = run(given)
    for places in sequences:
        # float32 in sums of other order, of values below 1.
        np.testing.assert_allclose(np.asarray(read)[places], alone(mixed, places), atol=2e-6)
    # What stands under padding has no part in anything.
    for leaf in gradients:
        assert np.all(np.asarray(leaf)[~valid] == 0)
    assert np.all(np.any(gradients.content[valid] != 0, axis=(1, 2)))
    other = Mixed(*(jnp.where(valid[:, None, None], x, 77.0) for x in given))
    (_, (again, after_again)), _ = run(other)
    np.testing.assert_array_equal(again[valid], read[valid])
    chex.assert_trees_all_equal(after_again, after)
