"""Calls of the policy losses, for the contract of arrays."""

from typing import get_args

import jrl

MODES = get_args(jrl.Aggregation)


def arrays(b):
    """The arrays of every policy loss."""
    return b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]


def without_old(b):
    """The arrays of a loss without a ratio."""
    return b["logprobs"], b["advantages"], b["mask"]


def _ppo_loss(mode):
    return lambda b: jrl.ppo_loss(
        *arrays(b),
        clip_high=0.28,
        clip_dual=1.5,
        importance_weights=b["importance_weights"],
        aggregation=mode,
        max_length=9,
    )


# Bounds that bind on some of the rows and not on others.
WIDE = {"clip_low": 0.1, "clip_high": 0.2}
LOSSES = {
    "gspo_loss token": lambda b, **k: jrl.gspo_loss(*arrays(b), **WIDE, **k),
    "gspo_loss sequence": lambda b, **k: jrl.gspo_loss(
        *arrays(b), **WIDE, gradient="sequence", **k
    ),
    "luspo_loss": lambda b, **k: jrl.luspo_loss(*arrays(b), **WIDE, **k),
    "gmpo_loss": lambda b, **k: jrl.gmpo_loss(*arrays(b), **k),
    "cispo_loss": lambda b, **k: jrl.cispo_loss(*arrays(b), clip_low=0.3, **k),
    "vespo_loss": lambda b, **k: jrl.vespo_loss(*arrays(b), **k),
    "sapo_loss": lambda b, **k: jrl.sapo_loss(*arrays(b), **k),
    "dro_loss": lambda b, **k: jrl.dro_loss(*arrays(b), beta=0.5, **k),
    "reinforce_loss": lambda b, **k: jrl.reinforce_loss(*without_old(b), **k),
}
# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "ppo_surrogate": lambda b: jrl.ppo_surrogate(*arrays(b), clip_high=0.28, clip_dual=1.5),
    "gspo_surrogate token": lambda b: jrl.gspo_surrogate(*arrays(b), **WIDE),
    "gspo_surrogate sequence": lambda b: jrl.gspo_surrogate(
        *arrays(b), **WIDE, gradient="sequence"
    ),
    "gspo_surrogate dual clip": lambda b: jrl.gspo_surrogate(*arrays(b), **WIDE, clip_dual=1.1),
    "luspo_surrogate": lambda b: jrl.luspo_surrogate(*arrays(b), **WIDE),
    "gmpo_surrogate": lambda b: jrl.gmpo_surrogate(*arrays(b)),
    "cispo_surrogate": lambda b: jrl.cispo_surrogate(*arrays(b), clip_low=0.3),
    "cispo_surrogate sequence": lambda b: jrl.cispo_surrogate(*arrays(b), **WIDE, level="sequence"),
    "vespo_surrogate": lambda b: jrl.vespo_surrogate(*arrays(b)),
    "sapo_surrogate": lambda b: jrl.sapo_surrogate(*arrays(b)),
    "sapo_surrogate sequence": lambda b: jrl.sapo_surrogate(*arrays(b), level="sequence"),
    "dro_surrogate": lambda b: jrl.dro_surrogate(*arrays(b), beta=0.5),
    "reinforce_surrogate": lambda b: jrl.reinforce_surrogate(*without_old(b)),
}
# One result per token that depends on the whole batch.
PER_BATCH = {}
# One result per batch.
SCALAR = {
    **{f"ppo_loss {mode}": _ppo_loss(mode) for mode in MODES},
    **{
        name: lambda b, loss=loss: loss(b, importance_weights=b["importance_weights"])
        for name, loss in LOSSES.items()
    },
    "positive_example_loss": lambda b: jrl.positive_example_loss(
        b["logprobs"], b["correct"], b["mask"]
    ),
}
