"""Calls of the critic's loss, the divergences and entropies, for the contract of arrays."""

from typing import get_args

import jax.numpy as jnp

import jrl


def _kl(kind):
    return lambda b: jrl.kl_estimate(b["logprobs"], b["ref_logprobs"], b["mask"], kind=kind)


def _value_loss(clip):
    return lambda b: jrl.value_loss(
        b["values"], b["old_values"], b["returns"], b["mask"], clip=clip
    )


def _tokens(b):
    """Some token of the vocabulary of three."""
    return (b["rewards"] > 0).astype(jnp.int32) + (b["returns"] > 0.5).astype(jnp.int32)


def _reference(b):
    """Other logits than the policy's."""
    return b["logits"][..., ::-1] / 2


def _kl_from_logits(direction, chunk_size):
    return lambda b: jrl.kl_from_logits(
        b["logits"], _reference(b), b["mask"], direction=direction, chunk_size=chunk_size
    )


def _diagnostics(b):
    """The diagnostics of tokens, all of them in one program."""
    d, mask, edges = jrl.diagnostics, b["mask"], (1, 3)
    rewards, values, returns = b["rewards"], b["values"], b["returns"]
    return (
        d.by_position(values, returns, mask, num_bins=3),
        d.calibration(values, returns > 0.3, mask, num_bins=4),
        d.bootstrap_bias_bound(b["per_token"], b["advantages"], mask, b["lam"]),
        d.terminal_reach(mask, lam=0.5, threshold=0.2),
        d.lambda_sensitivity(rewards, values, mask, lam=b["lam"], edges=edges),
        d.guard_rate(jnp.sum(mask, axis=-1, dtype=jnp.int32), alpha=0.3),
        d.within_between_variance(b["advantages"], mask),
        d.td_concentration(rewards, values, mask, share=0.3),
        d.outcome_contradiction(rewards, values, b["advantages"], mask),
        d.length_share(mask, edges=edges),
        d.negative_share(b["advantages"], mask),
    )


# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    **{kind: _kl(kind) for kind in get_args(jrl.KLEstimator) if kind != "k1+"},
    "entropy": lambda b: jrl.entropy_from_logits(b["logits"], b["mask"]),
    "entropy in chunks": lambda b: jrl.entropy_from_logits(b["logits"], b["mask"], chunk_size=2),
    "exact KL": _kl_from_logits("policy||reference", None),
    "exact KL in chunks": _kl_from_logits("policy||reference", 2),
    "exact reverse KL in chunks": _kl_from_logits("reference||policy", 2),
    "logprobs_from_logits": lambda b: jrl.logprobs_from_logits(
        b["logits"], _tokens(b), b["mask"], chunk_size=2
    ),
    "bootstrap_bias": lambda b: jrl.diagnostics.bootstrap_bias(
        b["returns"], b["mask"], b["lam"], gamma=b["gamma"]
    ),
}
# One result per batch.
SCALAR = {
    "value_loss": _value_loss(None),
    "value_loss clipped": _value_loss((0.2, 0.3)),
    "explained_variance": lambda b: jrl.explained_variance(b["values"], b["returns"], b["mask"]),
    "diagnostics": _diagnostics,
}
