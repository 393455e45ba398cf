"""Learning from the responses that were right by imitating them."""

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Scalar, as_floats, as_mask, check_rows, check_shapes
from jrl.losses.reduction import Mean, aggregate


def positive_example_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    correct: Shaped[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    num_tokens: Scalar | None = None,
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Negative log-likelihood of the correct responses, VAPO's imitation of its own successes.

    ``-sum_{i in T} sum_t logprobs_it / sum_{i in T} n_i`` with T the correct responses: a mean over
    *their* tokens, not over sequences and not over the tokens of the batch. VAPO adds it to the
    policy loss with a factor of 0.1.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      correct: true for the responses to imitate, one per row.
      mask: true on sampled tokens.
      num_tokens: sampled tokens of *correct* responses in the whole batch; counted here if None.

    Returns:
      `(loss, metrics)`; the loss is 0, and its gradient too, if no response is correct. The metric
      ``positive_nll`` is the same mean as a `Mean`.

    Raises:
      ValueError: if shapes do not agree, or there is not one `correct` per row.

    References:
      Yue et al., "VAPO", 2025, section 4.3. https://arxiv.org/abs/2504.05118

    Examples:
      >>> import jax.numpy as jnp
      >>> logprobs = jnp.array([[-1.0, -2.0], [-3.0, -4.0]])
      >>> loss, _ = positive_example_loss(logprobs, jnp.array([1, 0]), jnp.ones((2, 2)))
      >>> float(loss)
      1.5
    """
    check_shapes(logprobs=logprobs, mask=mask)
    check_rows("mask", mask, correct=correct)
    imitated = as_mask(mask) & as_mask(correct)[..., None]
    (logprobs,) = as_floats(logprobs)
    loss = aggregate(-logprobs, imitated, "token-mean", num_tokens=num_tokens)
    return loss, {"positive_nll": Mean.of(-logprobs, imitated)}
