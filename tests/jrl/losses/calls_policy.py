"""Calls of the policy losses, for the contract of arrays."""

from typing import get_args

import jrl

MODES = get_args(jrl.Aggregation)


def arrays(b):
    """The arrays of every policy loss."""
    return b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]


def _ppo_loss(mode):
    return lambda b: jrl.ppo_loss(
        *arrays(b),
        clip_high=0.28,
        clip_dual=1.5,
        importance_weights=b["importance_weights"],
        aggregation=mode,
        max_length=9,
    )


# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "ppo_surrogate": lambda b: jrl.ppo_surrogate(*arrays(b), clip_high=0.28, clip_dual=1.5),
}
# One result per token that depends on the whole batch.
PER_BATCH = {}
# One result per batch.
SCALAR = {
    **{f"ppo_loss {mode}": _ppo_loss(mode) for mode in MODES},
    "positive_example_loss": lambda b: jrl.positive_example_loss(
        b["logprobs"], b["correct"], b["mask"]
    ),
}
