"""What a recipe sees: a step's experience, and the pieces of it that the losses run on."""

from typing import Generic, TypeVar

from flax import struct

Leaf = TypeVar("Leaf")


@struct.dataclass
class Experience(Generic[Leaf]):
    """Everything known about a step's completions before the first update.

    Attributes:
      mask: ``[batch, time]`` sampled tokens.
      rewards: ``[batch]`` one per completion.
      groups: ``[batch]`` integers; completions of one prompt share one.
      lengths: ``[batch]`` sampled tokens of each completion.
      truncated: ``[batch]`` whether the length limit ended it.
      values: ``[batch, time]`` of the critic, None without one.
      old_logprobs: ``[batch, time]`` of the policy that sampled, nats: as the sampler gave them or
        as the trainer computes them.
      reference_logprobs: ``[batch, time]`` of the reference policy, None without one.
    """

    mask: Leaf
    rewards: Leaf
    groups: Leaf
    lengths: Leaf
    truncated: Leaf
    values: Leaf | None
    old_logprobs: Leaf
    reference_logprobs: Leaf | None


@struct.dataclass
class Batch(Generic[Leaf]):
    """Rows for an update; any selection of rows is a batch too.

    Attributes:
      tokens: ``[batch, time]`` ids of prompt and response.
      valid: ``[batch, time]`` what is not padding.
      mask: ``[batch, time]`` sampled tokens that count: those that are not rejected.
      old_logprobs: ``[batch, time]`` that ratios are taken against, as in `Experience`.
      sampler_logprobs: ``[batch, time]`` in the distribution drawn from (top-k, top-p), nats.
      advantages: ``[batch, time]``.
      correct: ``[batch]`` whether the completion has full marks.
      returns: ``[batch, time]`` targets of the critic, None without one.
      old_values: ``[batch, time]`` of the critic before the update, None without one.
      reference_logprobs: ``[batch, time]``, None without a reference policy.
      importance_weights: ``[batch, time]`` factors on the policy's token losses, None without.
    """

    tokens: Leaf
    valid: Leaf
    mask: Leaf
    old_logprobs: Leaf
    sampler_logprobs: Leaf
    advantages: Leaf
    correct: Leaf
    returns: Leaf | None = None
    old_values: Leaf | None = None
    reference_logprobs: Leaf | None = None
    importance_weights: Leaf | None = None


@struct.dataclass
class Totals(Generic[Leaf]):
    """Counts over a whole mini-batch: the denominators of its losses, scalars.

    Attributes:
      num_tokens: sampled tokens.
      num_sequences: rows with a sampled token.
      num_correct_tokens: sampled tokens of correct rows.
      num_valid: tokens that are not padding.
    """

    num_tokens: Leaf
    num_sequences: Leaf
    num_correct_tokens: Leaf
    num_valid: Leaf


def given(leaf: Leaf | None) -> Leaf:
    """`leaf`, which a recipe that asks for it always gets."""
    assert leaf is not None, "the trainer left out what the recipe needs"
    return leaf
