"""Sequences in batches that attention takes equally long for."""

import numpy as np
from jaxtyping import Float, Int

from moe.disaggregated.balance import pack


def equal_batches(
    contexts: np.ndarray, num_batches: int, slots: int, *, of_token: float, of_cached: float
) -> Int[np.ndarray, " sequence"]:
    """The batch of each sequence, so that predicted times are close to each other.

    A sequence takes ``of_token + of_cached context`` seconds: its products, and its keys and values
    from memory. The longest goes first, to the batch with least to do that has a free slot.

    Args:
      contexts: cached tokens of each sequence.
      num_batches: attention nodes times micro-batches.
      slots: sequences of a batch, at most.
      of_token, of_cached: seconds.

    Raises:
      ValueError: where slots are too few, or a time is below 0.
    """
    if of_token < 0 or of_cached < 0:
        raise ValueError(f"of_token={of_token} and of_cached={of_cached} must not be below 0.")
    return pack(of_token + of_cached * np.asarray(contexts, float), num_batches, slots)


def seconds(
    contexts: np.ndarray,
    batches: Int[np.ndarray, " sequence"],
    num_batches: int,
    *,
    of_token: float,
    of_cached: float,
) -> Float[np.ndarray, " batch"]:
    """What each batch is predicted to take."""
    each = of_token + of_cached * np.asarray(contexts, float)
    return np.bincount(batches, each, num_batches)
