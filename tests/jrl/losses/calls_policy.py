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


def both(loss, **reduced):
    """The losses of the tokens as they are, and reduced with weights."""

    def call(b):
        per_token, _ = loss(b, aggregation=None)
        weights = b["importance_weights"]
        return {"per token": per_token, "reduced": loss(b, importance_weights=weights, **reduced)}

    return call


def _ppo_loss(b, **settings):
    return jrl.ppo_loss(*arrays(b), clip_high=0.28, clip_dual=1.5, **settings)


def _every_mode(b):
    """The losses of the tokens, and reduced in every way."""
    weights = b["importance_weights"]
    return {
        "per token": _ppo_loss(b, aggregation=None)[0],
        "reduced": {
            mode: _ppo_loss(b, aggregation=mode, importance_weights=weights, max_length=9)
            for mode in MODES
        },
    }


# One result per token, of which each row depends on that row alone, and one per batch.
BOTH = {"ppo_loss": _every_mode, **{name: both(loss) for name, loss in LOSSES.items()}}
# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "gspo_loss dual clip": lambda b: jrl.gspo_loss(
        *arrays(b), **WIDE, clip_dual=1.1, aggregation=None
    )[0],
    "cispo_loss sequence": lambda b: jrl.cispo_loss(
        *arrays(b), **WIDE, level="sequence", aggregation=None
    )[0],
    "sapo_loss sequence": lambda b: jrl.sapo_loss(*arrays(b), level="sequence", aggregation=None)[
        0
    ],
}
# One result per batch.
SCALAR = {
    "positive_example_loss": lambda b: jrl.positive_example_loss(
        b["logprobs"], b["correct"], b["mask"]
    ),
}
