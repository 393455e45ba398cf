"""What logits say exactly: of a token, how undecided they are, how far they are from others."""

from jrl.losses.logits.entropy import entropy_from_logits
from jrl.losses.logits.kl import KLDirection, kl_from_logits
from jrl.losses.logits.token_logprobs import logprobs_from_logits

__all__ = [
    "KLDirection",
    "entropy_from_logits",
    "kl_from_logits",
    "logprobs_from_logits",
]
