"""Calls of HAPO, DPPO, the covariance losses and the masks, for the contract of arrays."""

import jax.numpy as jnp

import jrl


def arrays(b):
    """The arrays of every policy loss."""
    return b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]


def _signal(b, **settings):
    return jrl.entropy_signal(b["entropy"], b["mask"], **settings)


def _dppo(function, b, **settings):
    # Logarithms of probabilities, which a random batch may have above 0.
    logprobs, old = (-abs(b[name]) for name in ("logprobs", "old_logprobs"))
    return function(logprobs, old, b["advantages"], b["mask"], max_ratio=1.5, **settings)


def _kept(mask, b):
    """What a mask keeps of the log-probabilities, since a mask itself has no numbers."""
    kept = jnp.where(mask, b["logprobs"], 0)
    return kept.astype(jnp.float32) if kept.dtype == jnp.bfloat16 else kept


def _covariances(b):
    return jrl.covariances(b["logprobs"], b["advantages"], b["mask"])


# All tokens in the range, since a choice at random would follow the order of the rows.
CLIP_COV = {"fraction": 1, "low": 0.1, "high": 1.0, "clip_low": 0.2, "clip_high": 0.28}

# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "ppo_surrogate with a guard": lambda b: jrl.ppo_surrogate(*arrays(b), guard=1.5),
    # The entropy serves as a signal, which is then no statistic of the batch.
    "redistributed_advantages": lambda b: jrl.redistributed_advantages(*arrays(b), b["entropy"]),
    "hapo_surrogate of a given signal": lambda b: jrl.hapo_surrogate(*arrays(b), b["entropy"]),
    "dppo_surrogate tv": lambda b: _dppo(jrl.dppo_surrogate, b, kind="tv", max_divergence=0.1),
    "dppo_surrogate kl": lambda b: _dppo(jrl.dppo_surrogate, b, kind="kl", max_divergence=0.05),
    "dppo_surrogate tv, two bounds": lambda b: _dppo(
        jrl.dppo_surrogate, b, kind="tv", max_divergence=(0.05, 0.2)
    ),
    "off_policy_sequence_mask": lambda b: _kept(
        jrl.off_policy_sequence_mask(
            b["logprobs"], b["sampler_logprobs"], b["advantages"], b["mask"], max_divergence=0.1
        ),
        b,
    ),
}
# One result per token that depends on the whole batch.
PER_BATCH = {
    "entropy_statistics": lambda b: jrl.entropy_statistics(b["entropy"], b["mask"]),
    "standardized_entropy": lambda b: jrl.standardized_entropy(b["entropy"], b["mask"]),
    "entropy_signal": _signal,
    "entropy_signal released sign": lambda b: _signal(b, sign="release"),
    "hapo_surrogate": lambda b: jrl.hapo_surrogate(*arrays(b), _signal(b), clip_dual=1.5),
    "covariances": _covariances,
    "clip_cov_surrogate": lambda b: jrl.clip_cov_surrogate(*arrays(b), **CLIP_COV),
    "kl_cov_surrogate": lambda b: jrl.kl_cov_surrogate(*arrays(b), fraction=0.3),
    "top_entropy_mask": lambda b: _kept(
        jrl.top_entropy_mask(b["entropy"], b["mask"], fraction=0.4), b
    ),
}
# One result per batch.
SCALAR = {
    "hapo_loss": lambda b: jrl.hapo_loss(
        *arrays(b), _signal(b), clip_dual=1.5, importance_weights=b["importance_weights"]
    ),
    "dppo_loss tv": lambda b: _dppo(jrl.dppo_loss, b, kind="tv", max_divergence=0.1),
    "dppo_loss kl": lambda b: _dppo(jrl.dppo_loss, b, kind="kl", max_divergence=0.05),
    "clip_cov_loss": lambda b: jrl.clip_cov_loss(*arrays(b), **CLIP_COV),
    "kl_cov_loss": lambda b: jrl.kl_cov_loss(*arrays(b), fraction=0.3),
    "entropy_threshold": lambda b: jrl.entropy_threshold(b["entropy"], b["mask"], fraction=0.4),
}
