"""Calls of the corrections for a sampler that is not the trainer, for the contract of arrays."""

from typing import get_args

import jax.numpy as jnp

import jrl


def _arrays(b):
    return b["logprobs"], b["sampler_logprobs"], b["mask"]


def _weights(level):
    return lambda b: jrl.mismatch_weights(*_arrays(b), level=level)


def _of_weights(function, **settings):
    return lambda b: function(b["importance_weights"], b["mask"], **settings)


def _kept(function, **settings):
    """What a mask keeps of the log-probabilities, since a mask itself has no numbers."""

    def call(b):
        kept = jnp.where(function(*_arrays(b), **settings), b["logprobs"], 0)
        return kept.astype(jnp.float32) if kept.dtype == jnp.bfloat16 else kept

    return call


# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    **{f"mismatch_weights {level}": _weights(level) for level in get_args(jrl.WeightLevel)},
    "truncated_weights": _of_weights(jrl.truncated_weights, high=1.5, low=0.8),
    "icepop_weights": _of_weights(jrl.icepop_weights, low=0.8, high=1.5),
    "sequence_masked_weights": lambda b: jrl.sequence_masked_weights(
        *_arrays(b), low=0.8, high=1.5
    ),
    "geometric_rejection_mask": _kept(jrl.geometric_rejection_mask, low=0.8, high=1.5),
    **{
        f"divergence_rejection_mask {over}": _kept(
            jrl.divergence_rejection_mask, over=over, bound=0.2
        )
        for over in get_args(jrl.RejectionOver)
    },
}
# One result per token that depends on the whole batch.
PER_BATCH = {
    f"normalized_weights {over}": _of_weights(jrl.normalized_weights, over=over)
    for over in get_args(jrl.WeightMean)
}
# One result per batch.
SCALAR = {"mismatch_statistics": lambda b: jrl.mismatch_statistics(*_arrays(b))}
