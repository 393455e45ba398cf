"""A step's completions on the mesh, from the end of the rollout to the last update."""

from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

Leaf = TypeVar("Leaf")


@struct.dataclass
class Batch(Generic[Leaf]):
    """Completions as rows; any selection of rows is a batch too.

    Every ``[batch, time]`` array is aligned to the token that it speaks about, log-probabilities
    are in nats. What a recipe has no use for, and what is not known yet, is None.

    Attributes:
      tokens: ``[batch, time]`` ids of prompt and response.
      valid: ``[batch, time]`` what is not padding.
      mask: ``[batch, time]`` sampled tokens that count; with holes where an environment answers.
      behaviour_logprobs: ``[batch, time]`` in the distribution drawn from: at the temperature of
        that token, which may follow its entropy, and after top-k and top-p.
      old_logprobs: ``[batch, time]`` that ratios are taken against: of the whole policy that
        sampled, at the base temperature, as the sampler gave them or as the trainer computes them.
      old_entropy: ``[batch, time]`` of that policy before each token, at the base temperature.
      truncated: ``[batch]`` whether the length limit ended the response.
      finished: ``[batch]`` whether a stop token or the length limit ended the response; false where
        only the window did and it goes on in another step. None where all are finished.
      groups: ``[batch]`` integers; completions of one prompt share one.
      lengths: ``[batch]`` sampled tokens of each completion, whether or not they count.
      rewards: ``[batch]`` one per completion, those of all turns together; 0 where it is not
        finished.
      turn_rewards: ``[batch, time]`` what of it belongs to turns of a conversation before the last,
        on the last token of each; None where there are none.
      correct: ``[batch]`` whether the completion is finished and has full marks.
      old_values: ``[batch, time]`` of the critic before the update.
      reference_logprobs: ``[batch, time]`` of the reference policy.
      advantages: ``[batch, time]``.
      returns: ``[batch, time]`` targets of the critic.
      critic_mask: ``[batch, time]`` tokens that count for the critic; None where they are those of
        `mask`.
      importance_weights: ``[batch, time]`` factors on the policy's token losses.
      choices: ``[batch, time, layer, k]`` integers: the experts that the policy's routers sent each
        token to when it was read, while decoding or in the trainer's own pass, for the layers that
        have experts; `num_experts` where there is no record (padding, and of a rollout the last
        token sampled, which was never read). None where nothing is replayed.
      starts: ``[batch]`` where rows lie in a packed pass (`jrl.rollout.packing`).
    """

    tokens: Leaf
    valid: Leaf
    mask: Leaf
    behaviour_logprobs: Leaf | None = None
    old_logprobs: Leaf | None = None
    old_entropy: Leaf | None = None
    truncated: Leaf | None = None
    finished: Leaf | None = None
    groups: Leaf | None = None
    lengths: Leaf | None = None
    rewards: Leaf | None = None
    turn_rewards: Leaf | None = None
    correct: Leaf | None = None
    old_values: Leaf | None = None
    reference_logprobs: Leaf | None = None
    advantages: Leaf | None = None
    returns: Leaf | None = None
    critic_mask: Leaf | None = None
    importance_weights: Leaf | None = None
    choices: Leaf | None = None
    starts: Leaf | None = None


@struct.dataclass
class Targets(Generic[Leaf]):
    """What a step learns from, ``[batch, time]``.

    Attributes:
      advantages: of the policy's tokens.
      returns: what the critic's values should be; None without a critic.
      mask: tokens whose advantages count; None where all that were sampled do.
      critic_mask: tokens whose returns count; None where they are those of the policy.
    """

    advantages: Leaf
    returns: Leaf | None = None
    mask: Leaf | None = None
    critic_mask: Leaf | None = None


@struct.dataclass
class Totals(Generic[Leaf]):
    """What is known of a whole mini-batch: the denominators of its losses, scalars, and more.

    Attributes:
      num_tokens: sampled tokens that count.
      num_sequences: rows with such a token.
      num_correct_tokens: such tokens of correct rows.
      num_valid: tokens that are not padding.
      statistics: what the recipe's `statistics` gave; None without.
    """

    num_tokens: Leaf
    num_sequences: Leaf
    num_correct_tokens: Leaf
    num_valid: Leaf
    statistics: Any = None


def given(leaf: Leaf | None) -> Leaf:
    """`leaf`, which a recipe that asks for it always gets."""
    assert leaf is not None, "the trainer left out what the recipe needs"
    return leaf


def responses_of(batch: Batch[Array]) -> Bool[Array, "batch time"]:
    """All sampled tokens, those of earlier windows too: the last `Batch.lengths` of each row that
    are no padding."""
    # Counted from the end: prompts are as long as they are, responses end with the row's last
    # token. (Conversations, which have holes, are not written in windows.)
    remaining = jnp.flip(jnp.cumsum(jnp.flip(batch.valid, 1), 1, dtype=jnp.int32), 1)
    return batch.valid & (remaining <= given(batch.lengths)[:, None])
