"""Batch of a step's completions on the mesh, from the end of the rollout to the last update."""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from jrl.losses import kl_estimate
from jrl.processes.agreement import to_devices
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_onto

Leaf = TypeVar("Leaf")
CRITIC, REFERENCE, TEACHER = "critic", "reference", "teacher"
"""Roles of the networks that the library's recipes need beside the policy."""


@struct.dataclass
class Batch(Generic[Leaf]):
    """Completions as rows; any selection of rows is a batch too.

    Every ``[batch, time]`` array is aligned to the token that it describes, log-probabilities are
    in nats. Arrays that a recipe does not use, or that are not computed yet, are None.

    Attributes:
      tokens: ``[batch, time]`` ids of prompt and response.
      valid: ``[batch, time]`` false on padding.
      mask: ``[batch, time]`` loss mask of the sampled tokens; false on an environment's answers.
      behaviour_logprobs: ``[batch, time]`` in the distribution sampled from: at the temperature of
        that token, which may follow its entropy, and after top-k and top-p.
      old_logprobs: ``[batch, time]`` denominators of the probability ratios: of the full
        distribution of the policy that sampled, at the base temperature, as recorded by the sampler
        or as recomputed by the trainer.
      old_entropy: ``[batch, time]`` of that policy before each token, at the base temperature.
      truncated: ``[batch]`` true if the length limit ended the response.
      finished: ``[batch]`` true if a stop token or the length limit ended the response; false if
        only the window ended and it continues in another step. None if all are finished.
      groups: ``[batch]`` integers; completions of one prompt share one.
      lengths: ``[batch]`` sampled tokens of each completion, inside or outside of the loss mask.
      rewards: ``[batch]`` one per completion, the sum over all turns; 0 if it is not finished.
      turn_rewards: ``[batch, time]`` the part of it for turns of a conversation before the last, on
        the last token of each; None if there are none.
      correct: ``[batch]`` true if the completion is finished and has full marks.
      old_values: ``[batch, time]`` of the critic before the update.
      logprobs: ``[batch, time]`` of each frozen network of `Recipe.networks`, by its role, at the
        base temperature, for example ``batch.logprobs["teacher"]``.
      argmax: ``[batch, time]`` 1 for tokens that are the argmax of such a network, 0 for others, by
        the roles whose `NetworkSpec.outputs` have it.
      kl: ``[batch, time]`` KL(policy || network) of each token's distributions in closed form, by
        the roles whose `NetworkSpec.outputs` have it.
      advantages: ``[batch, time]``.
      returns: ``[batch, time]`` targets of the critic.
      critic_mask: ``[batch, time]`` loss mask of the critic; None if it equals `mask`.
      importance_weights: ``[batch, time]`` factors on the policy's token losses.
      choices: ``[batch, time, layer, k]`` expert ids for router replay: the experts that the
        policy's routers chose for each token when it was read, while decoding or in the trainer's
        own pass, for the layers that have experts; `num_experts` for tokens that have no record
        (padding, and in a rollout the last token sampled, which was never read). None without
        replay.
      starts: ``[batch]`` offsets of the rows in a packed pass (`jrl.rollout.packing`).
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
    logprobs: dict[str, Leaf] = struct.field(default_factory=dict)
    argmax: dict[str, Leaf] = struct.field(default_factory=dict)
    kl: dict[str, Leaf] = struct.field(default_factory=dict)
    advantages: Leaf | None = None
    returns: Leaf | None = None
    critic_mask: Leaf | None = None
    importance_weights: Leaf | None = None
    choices: Leaf | None = None
    starts: Leaf | None = None

    @property
    def reference_logprobs(self) -> Leaf | None:
        """Log-probabilities of the reference model; None if the recipe has none."""
        return self.logprobs.get(REFERENCE)


@struct.dataclass
class Targets(Generic[Leaf]):
    """Training targets of a step, ``[batch, time]``.

    Attributes:
      advantages: of the policy's tokens.
      returns: targets of the critic's values; None if the recipe has no critic.
      mask: loss mask of the policy; None for all sampled tokens.
      critic_mask: loss mask of the critic; None for the policy's.
    """

    advantages: Leaf
    returns: Leaf | None = None
    mask: Leaf | None = None
    critic_mask: Leaf | None = None


@struct.dataclass
class Totals(Generic[Leaf]):
    """Totals of a whole mini-batch: the denominators of its losses, and the recipe's statistics.

    Attributes:
      num_tokens: tokens in the loss mask, a scalar as the next three.
      num_sequences: rows with such a token.
      num_correct_tokens: such tokens of correct rows.
      num_valid: tokens that are not padding.
      statistics: result of the recipe's `statistics`; None without.
    """

    num_tokens: Leaf
    num_sequences: Leaf
    num_correct_tokens: Leaf
    num_valid: Leaf
    statistics: Any = None


def over_rows(mesh: FoldedMesh) -> NamedSharding:
    """Sharding of arrays with a row per sequence, over dp."""
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.dp))


def replicated(mesh: FoldedMesh) -> NamedSharding:
    """Sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh.mesh, PartitionSpec())


def take_rows(batch: Batch[Array], rows: np.ndarray, mesh: FoldedMesh) -> Batch[Array]:
    """Selects the rows with these indices in one compiled function; no data moves through the
    host."""
    indices = to_devices(rows.astype(np.int32), replicated(mesh))
    return _compiled_take(over_rows(mesh))(batch, indices)


@cache
def _compiled_take(sharding: NamedSharding) -> Callable[[Any, Array], Any]:
    def take(batch: Any, rows: Array) -> Any:
        return jax.tree.map(lambda array: jnp.take(array, rows, axis=0), batch)

    return jit_onto(take, sharding)


def required(leaf: Leaf | None) -> Leaf:
    """Asserts that `leaf` is not None and returns it; the trainer provides what a recipe needs."""
    assert leaf is not None, "the trainer did not provide an array that the recipe needs"
    return leaf


def responses_of(batch: Batch[Array]) -> Bool[Array, "batch time"]:
    """Mask of all sampled tokens, earlier windows included: the last `Batch.lengths` tokens of each
    row that are no padding."""
    # Counted from the end: prompts vary in length, responses end with the row's last token.
    # (Conversations, whose masks have holes, are not sampled in windows.)
    remaining = jnp.flip(jnp.cumsum(jnp.flip(batch.valid, 1), 1, dtype=jnp.int32), 1)
    return batch.valid & (remaining <= required(batch.lengths)[:, None])


def penalised_rewards(batch: Batch[Array], kl_coef: float | None) -> Float[Array, "batch time"]:
    """Reward of each token: the completion's on its last token (in a conversation, each turn's on
    the last token of the turn), plus on every token
    ``-kl_coef (old_logprobs - reference_logprobs)``, the k1 estimate of the KL divergence."""
    rewards = per_turn_rewards(batch)
    if kl_coef is None:
        return rewards
    # k1 is unbiased. As a loss its expected gradient would be zero; in a reward it has the right
    # one.
    kl = kl_estimate(
        required(batch.old_logprobs), required(batch.reference_logprobs), batch.mask, kind="k1"
    )
    return rewards - kl_coef * kl


def per_turn_rewards(batch: Batch[Array]) -> Float[Array, "batch time"]:
    """Each row's reward on its last sampled token, except for the rewards of turns before the last,
    which are on the last token of their turn."""
    rewards, turn_rewards = required(batch.rewards), batch.turn_rewards
    if turn_rewards is None:
        return terminal_rewards(rewards, batch.mask)
    # Rewards on tokens that were rejected meanwhile move to the end with the rest.
    turn_rewards = jnp.where(batch.mask, turn_rewards, 0.0)
    return turn_rewards + terminal_rewards(rewards - jnp.sum(turn_rewards, axis=1), batch.mask)


def terminal_rewards(
    rewards: Float[Array, "batch"], mask: Bool[Array, "batch time"]
) -> Float[Array, "batch time"]:
    """Each row's reward on its last sampled token, 0 elsewhere."""
    order = jnp.arange(mask.shape[1])
    # Masks may have holes, so the last token is the last true position and not the length.
    last = jnp.max(jnp.where(mask, order[None, :], -1), axis=1)
    return jnp.where(order[None, :] == last[:, None], rewards[:, None], 0.0)
