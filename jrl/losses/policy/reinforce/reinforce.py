"""REINFORCE: the policy gradient without a ratio; it is the loss of GPG, too."""

from typing import Unpack

from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import check_shapes
from jrl.losses.policy.tokens import Loss, prepare, reduce_surrogate
from jrl.losses.reduction import Aggregation, Denominators, Mean


def reinforce_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of REINFORCE, ``-A logprobs``: the policy gradient without a ratio.

    It is unbiased for data sampled from the current policy, hence for one step per batch. Every
    loss of this package that has a ratio has this gradient where the ratio is 1: LUSPO times the
    length, GMPO and the sequence form of GSPO with the mean of a row's advantages.

    With ``aggregation="seq-mean-token-sum"`` its gradient estimates that of the expected return.
    The default, a mean over tokens, is that of GPG, whose loss this is: GPG is its group-relative
    advantages followed by this function, and `gpg_loss` is another name for it.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A log-probability of minus
        infinity gives an infinite loss: there is no old policy to measure it against.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`, such as
        corrections for a sampler that differs from the current policy; no gradient. None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`; None reduces nothing, and
        the loss is one per token.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`; none of them beside ``aggregation=None``.

    Returns:
      `(loss, metrics)`. The loss is one number, or one per token, 0 where the mask is false, with
      ``aggregation=None``. The metric ``nll`` is the mean of ``-logprobs`` over the true tokens,
      kept as a `Mean`; for tokens of the current policy it estimates the entropy.

    Raises:
      ValueError: if the aggregation is unknown or stands beside denominators as None, or shapes do
        not agree.

    References:
      Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
      learning", 1992. https://doi.org/10.1007/BF00992696
      Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning",
      2025. https://arxiv.org/abs/2504.02546

    Examples:
      >>> import jax.numpy as jnp
      >>> arrays = jnp.array([-1.0, -2.0]), jnp.array([0.5, -1.0]), jnp.ones(2)
      >>> losses, _ = reinforce_loss(*arrays, aggregation=None)
      >>> losses.tolist(), float(reinforce_loss(*arrays)[0])
      ([0.5, -2.0], -0.75)
    """
    check_shapes(logprobs=logprobs, mask=mask)
    tokens = prepare(logprobs, logprobs, advantages, mask)
    surrogate = -tokens.advantages * tokens.logprobs
    nll = {"nll": -tokens.logprobs}
    return reduce_surrogate(
        reinforce_loss, surrogate, nll, tokens, aggregation, importance_weights, denominators
    )


# The loss of GPG is that of REINFORCE; what is new in the paper is its advantages.
gpg_loss = reinforce_loss
