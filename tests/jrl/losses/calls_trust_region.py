"""Calls of HAPO, DPPO, the covariance losses and the masks, for the contract of arrays."""

import jax.numpy as jnp
from calls_policy import arrays, both

import jrl


def _signal(b, **settings):
    return jrl.entropy_signal(b["entropy"], b["mask"], **settings)


def _dppo(**settings):
    def loss(b, **more):
        # Logarithms of probabilities, which a random batch may have above 0.
        logprobs, old = (-abs(b[name]) for name in ("logprobs", "old_logprobs"))
        arrays = logprobs, old, b["advantages"], b["mask"]
        return jrl.dppo_loss(*arrays, max_ratio=1.5, **settings, **more)

    return both(loss)


def _kept(mask, b):
    """What a mask keeps of the log-probabilities, since a mask itself has no numbers."""
    kept = jnp.where(mask, b["logprobs"], 0)
    return kept.astype(jnp.float32) if kept.dtype == jnp.bfloat16 else kept


def _covariances(b):
    return jrl.covariances(b["logprobs"], b["advantages"], b["mask"])


# All tokens in the range, since a choice at random would follow the order of the rows.
CLIP_COV = {"fraction": 1, "low": 0.1, "high": 1.0, "clip_low": 0.2, "clip_high": 0.28}

# One result per token, of which each row depends on that row alone, and one per batch.
BOTH = {
    "dppo_loss tv": _dppo(kind="tv", max_divergence=0.1),
    "dppo_loss kl": _dppo(kind="kl", max_divergence=0.05),
    "dppo_loss tv, two bounds": _dppo(kind="tv", max_divergence=(0.05, 0.2)),
    # The entropy serves as a signal, which is then no statistic of the batch.
    "hapo_loss of a given signal": both(
        lambda b, **k: jrl.hapo_loss(*arrays(b), b["entropy"], **k)
    ),
}
# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "ppo_loss with a guard": lambda b: jrl.ppo_loss(*arrays(b), guard=1.5, aggregation=None)[0],
    "redistributed_advantages": lambda b: jrl.redistributed_advantages(*arrays(b), b["entropy"]),
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
    "covariances": _covariances,
    "top_entropy_mask": lambda b: _kept(
        jrl.top_entropy_mask(b["entropy"], b["mask"], fraction=0.4), b
    ),
}
# One result per token that depends on the whole batch, and one per batch.
BOTH_OF_BATCH = {
    "hapo_loss": both(lambda b, **k: jrl.hapo_loss(*arrays(b), _signal(b), clip_dual=1.5, **k)),
    "clip_cov_loss": both(lambda b, **k: jrl.clip_cov_loss(*arrays(b), **CLIP_COV, **k)),
    "kl_cov_loss": both(lambda b, **k: jrl.kl_cov_loss(*arrays(b), fraction=0.3, **k)),
}
# One result per batch.
SCALAR = {
    "entropy_threshold": lambda b: jrl.entropy_threshold(b["entropy"], b["mask"], fraction=0.4),
}
