"""SEQ-1, the published pair of responses, and shortcuts for the tests of policy losses."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from batches import MASK, batch
from compiled import compiled

# Two responses of three and two tokens; what is under the mask must not matter.
MASK_1 = np.array([[1, 1, 1], [1, 1, 0]], bool)
OLD_1 = np.array([[-1, -2, -0.5], [-0.7, -1.1, np.nan]])
NEW_1 = np.array([[-0.9, -2.3, -0.5], [-0.2, -1, np.inf]])
ADVANTAGES_1 = np.array([[1], [-0.5]])


def arrays(b):
    """The arrays of every policy loss, from a batch."""
    return b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]


def without_old(b):
    """The arrays of a loss that has no ratio."""
    return b["logprobs"], b["advantages"], b["mask"]


def sequences():
    """SEQ-1 in the order of a loss's arguments."""
    return (*(x.astype(np.float32) for x in (NEW_1, OLD_1, ADVANTAGES_1)), MASK_1)


def per_token(loss, *arrays, **settings):
    """The losses of the tokens, without their metrics."""
    return compiled(loss)(*arrays, **settings, aggregation=None)[0]


@functools.cache
def _summed(loss):
    """The losses of the tokens, and the gradient of their sum by the first array."""

    def total(*arrays, **settings):
        losses, _ = loss(*arrays, **settings, aggregation=None)
        return jnp.sum(losses), losses

    return jax.grad(total, has_aux=True)


def value_and_slope(loss, arrays, **settings):
    """Losses of the tokens, and the gradient of their sum by the current log-probabilities."""
    slope, losses = compiled(_summed(loss))(*arrays, **settings)
    return np.asarray(losses), np.asarray(slope)


# Pieces of unequal sizes, one of them empty: equal ones make wrong denominators look right.
PIECES = (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5))


def assert_a_cut_sums_to_the_whole(loss, seeds, *, by="logprobs", of_the_whole=lambda b: {}):
    """Compare `loss(batch, **settings)` and its gradient by one of the arrays, summed over pieces
    of
    rows, with all rows at once. Pieces get the denominators and what is `of_the_whole` batch."""
    counts = {"num_tokens": int(MASK.sum()), "num_sequences": int(MASK.any(1).sum())}

    def step(b, **settings):
        return jax.value_and_grad(lambda x: loss({**b, by: x}, **settings), has_aux=True)(b[by])

    @jax.jit
    @jax.vmap
    def both(b):
        inputs = counts | of_the_whole(b)
        parts = [step({n: x[piece] for n, x in b.items()}, **inputs) for piece in PIECES]
        summed = jax.tree.map(lambda *xs: sum(xs), *(result for result, _ in parts))
        return (summed, jnp.concatenate([slope for _, slope in parts])), step(b)

    batches = [{n: x for n, x in batch(seed).items() if x.ndim > 1} for seed in seeds]
    actual, expected = both(jax.tree.map(lambda *xs: np.stack(xs), *batches))
    # Sums of a dozen float32 in another order.
    chex.assert_trees_all_close(actual, expected, rtol=5e-6, atol=2e-6)
