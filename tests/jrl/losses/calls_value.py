"""Calls of the critic's loss, the divergences and entropies, for the contract of arrays."""

from typing import get_args

import jrl


def _kl(kind):
    return lambda b: jrl.kl_estimate(b["logprobs"], b["ref_logprobs"], b["mask"], kind=kind)


def _value_loss(clip):
    return lambda b: jrl.value_loss(
        b["values"], b["old_values"], b["returns"], b["mask"], clip=clip
    )


# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    **{kind: _kl(kind) for kind in get_args(jrl.KLEstimator) if kind != "k1+"},
    "entropy": lambda b: jrl.entropy_from_logits(b["logits"], b["mask"]),
}
# One result per batch.
SCALAR = {
    "value_loss": _value_loss(None),
    "value_loss clipped": _value_loss((0.2, 0.3)),
    "explained_variance": lambda b: jrl.explained_variance(b["values"], b["returns"], b["mask"]),
}
