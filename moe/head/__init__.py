"""LM head and value head: logits, log-probabilities and entropies from the last hidden states."""

from moe.head.scores import is_argmax, logits_of, logprobs_and_entropy, value_of

__all__ = ["is_argmax", "logits_of", "logprobs_and_entropy", "value_of"]
