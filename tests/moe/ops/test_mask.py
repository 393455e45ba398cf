"""Which keys are visible, by definition; and which blocks of them are known to be hidden."""

import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit

from moe.attention.layer import window_of_layer
from moe.config import ModelConfig
from moe.ops.mask import TokenIndices, may_be_visible, visible


def marks_of(segments):
    """Rows in the order of columns."""
    segments = np.asarray(segments)
    column = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    same = (segments[:, :, None] == segments[:, None, :]) & np.tri(
        segments.shape[1], k=-1, dtype=bool
    )
    return TokenIndices(*(x.astype(np.int32) for x in (column, same.sum(axis=2), segments)))


see = jit(visible)
meets = jit(may_be_visible)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_visible_are_earlier_tokens_of_the_own_segment_inside_the_window(window):
    """Padding between two tokens is no distance, other segments are none."""
    segments = np.array([[1, 1, 0, 1, 1, 1, 0], [2, 1, 2, 1, 2, 1, 2]])
    marks = marks_of(segments)
    found = np.asarray(see(marks, marks, window))
    for row, ids in enumerate(segments):
        for query, own in enumerate(ids):
            earlier = [c for c in range(query + 1) if ids[c] == own and own]
            assert set(np.flatnonzero(found[row, query])) == set(earlier[-(window or 7) :])


@pytest.mark.parametrize("window", [None, 2, 6])
def test_meets_covers_visible_pairs(window):
    """Random blocks; and blocks that only one of the three ranges tells apart."""
    draw = np.random.default_rng(0)
    sizes, hidden = (2, 24), 0
    for _ in range(40):
        marks = marks_of(np.sort(draw.integers(0, 4, sizes), axis=1))
        a, b = draw.integers(0, 19, 2)
        query, key = (TokenIndices(*(x[:, start : start + 5] for x in marks)) for start in (a, b))
        meet = bool(meets(query, key, window))
        assert meet or not np.any(see(query, key, window))
        hidden += not meet
    assert hidden > 5


def test_blocks_are_told_apart_by_column_segment_and_window():
    marks = marks_of(np.array([[1, 1, 1, 1, 2, 2, 2, 2]]))
    first, second, third = (
        TokenIndices(*(x[:, start : start + 2] for x in marks)) for start in (0, 2, 4)
    )
    assert meets(second, first)
    assert not meets(first, second)
    assert not meets(third, first)
    assert meets(second, first, 2)
    assert not meets(second, first, 1)
    nothing = second._replace(segment=np.zeros_like(second.segment))
    assert not meets(second, nothing)
    assert not meets(nothing, first, 2)


def test_the_window_of_a_layer_known_at_run_time():
    config = ModelConfig(11, num_layers=4, sliding_window=5, full_attention_layers=(0, 2))
    assert [window_of_layer(config, layer) for layer in range(4)] == [None, 5, None, 5]
    marks = marks_of(np.ones((1, 9), int))
    traced = jit(lambda n, marks: visible(marks, marks, window_of_layer(config, n)))
    for layer in range(4):
        np.testing.assert_array_equal(
            traced(layer, marks), see(marks, marks, window_of_layer(config, layer))
        )
    same = ModelConfig(11, num_layers=4, sliding_window=5)
    assert window_of_layer(same, jnp.asarray(2)) == 5
