"""SEQ-1, the published pair of responses, and shortcuts for the tests of policy losses."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from batches import BATCH, MASK, batch

# Two responses of three and two tokens; what is under the mask must not matter.
MASK_1 = np.array([[1, 1, 1], [1, 1, 0]], bool)
OLD_1 = np.array([[-1, -2, -0.5], [-0.7, -1.1, np.nan]])
NEW_1 = np.array([[-0.9, -2.3, -0.5], [-0.2, -1, np.inf]])
ADVANTAGES_1 = np.array([[1], [-0.5]])


def arrays(b):
    """The arrays of every policy loss, from a batch."""
    return b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]


def without_old(b):
    """The arrays of a loss without a ratio."""
    return b["logprobs"], b["advantages"], b["mask"]


def sequences(dtype=jnp.float32):
    """SEQ-1 in the order of a loss's arguments."""
    arrays = (jnp.asarray(x, dtype) for x in (NEW_1, OLD_1, ADVANTAGES_1))
    return (*arrays, jnp.asarray(MASK_1))


def per_token(loss, *arrays, **settings):
    """The losses of the tokens, without their metrics."""
    return loss(*arrays, **settings, aggregation=None)[0]


def value_and_slope(loss, arrays, **settings):
    """Losses of the tokens, and the gradient of their sum by the current log-probabilities."""

    def total(logprobs):
        losses = per_token(loss, logprobs, *arrays[1:], **settings)
        return jnp.sum(losses), losses

    slope, losses = jax.grad(total, has_aux=True)(arrays[0])
    return np.asarray(losses), np.asarray(slope)


def assert_any_cut_sums_to_the_whole(loss, seed, cuts):
    """Compare `loss(batch, **denominators)` of pieces of rows with that of all of them."""
    b = batch(seed)
    edges = [0, *sorted(cuts), BATCH]
    counts = {"num_tokens": int(MASK.sum()), "num_sequences": int(MASK.any(1).sum())}

    def step(piece, **denominators):
        rows = jax.tree.map(lambda x: x[piece], {k: x for k, x in b.items() if x.ndim > 1})

        def of(logprobs):
            return loss({**rows, "logprobs": logprobs}, max_length=11, **denominators)

        return jax.value_and_grad(of, has_aux=True)(rows["logprobs"])

    whole_result, whole_slope = step(slice(None))
    parts = [step(slice(i, j), **counts) for i, j in itertools.pairwise(edges)]
    add = functools.partial(jax.tree.map, operator.add)
    result = functools.reduce(add, (result for result, _ in parts))
    slope = jnp.concatenate([slope for _, slope in parts])
    # Sums of a dozen float32 in another order.
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=5e-6, atol=2e-6),
        (result, slope),
        (whole_result, whole_slope),
    )
