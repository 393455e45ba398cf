"""Batches of the losses that bound a step by more than a ratio."""

import numpy as np
import oracles

LOGPROBS = [[-0.5, -1.2, -0.1, -2.0], [-0.9, None, None, -0.3], [None, None, None, None]]


OLD = [[-0.6, -0.8, -0.1, -3.5], [-1.9, None, None, -0.9], [None, None, None, None]]


ADVANTAGES = [[1.0, -0.5, 2.0, -1.5], [0.75, None, None, -1.0], [None, None, None, None]]


MASK = [[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]]


NOTHING = [[0, 0, 0, 0]] * 3


REDUCED = " Then aggregate, by token-mean unless given, or one loss per token for null."


TOKENS = {"logprobs": LOGPROBS, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK}


def _loss(losses, slopes, acts, mask, aggregation):
    """Results of a loss, from the losses of its tokens and the bounds that act on them.

    With no aggregation it is those losses as they are.
    """
    tokens = max(int(np.sum(mask)), 1)
    if aggregation is None:
        reduced, factors = losses, 1.0
    else:
        reduced = oracles.aggregate(losses, mask, aggregation)
        factors = oracles.token_weights(mask, aggregation)
    return {
        "loss": reduced,
        "metrics": {
            "pg_clipfrac": (acts == "clip").sum() / tokens,
            "pg_clipfrac_lower": (acts == "dual").sum() / tokens,
        },
        "gradients": {"logprobs": slopes * factors},
    }


H = [[0.02, 0.05, 0.10, 0.30, 0.60, 0.90, 1.20, 2.00]]


ALL = [[1] * 8]


H_HOLES = [[0.3, None, 0.0, 1.5], [None, 2.5, 0.7, None], [None, None, None, None]]


H_MASK = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
