"""Exact quantities from logits: log-probability of a token, entropy, KL divergence."""

from jrl.losses.logits.entropy import entropy_from_logits
from jrl.losses.logits.kl import KLDirection, kl_from_logits
from jrl.losses.logits.token_logprobs import logprobs_from_logits

__all__ = [
    "KLDirection",
    "entropy_from_logits",
    "kl_from_logits",
    "logprobs_from_logits",
]
