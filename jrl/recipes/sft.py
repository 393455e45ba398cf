"""Supervised fine-tuning (SFT) on given conversations, the stage before reinforcement learning."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.losses import Mean
from jrl.recipes.base.batch import Batch, Targets
from jrl.recipes.base.optimizer import Schedule
from jrl.recipes.base.recipe import Metrics, Recipe, Supervision
from jrl.setting import check_settings, setting

ROWS_SHOWN = 4
"""Held-out prompts whose completions are sampled for people to read."""


@dataclass(frozen=True)
class Sft(Recipe):
    """Negative log-likelihood of the assistant's tokens, ``-log p(token | tokens before it)``.

    A step is one optimizer step on a batch of conversations. This equals the policy gradient of
    given tokens, each with the advantage 1.
    """

    supervised: ClassVar[bool] = True

    group_size: int = 1
    """Rows that share a prompt."""
    batch: int = setting(64, minimum=1, sampled=True)
    """Conversations per optimizer step; a multiple of the data-parallel devices."""
    epochs: int = 1
    """Passes over the conversations, each in another order, if --steps is not given. The last step
    is a full batch, which may start another pass."""
    micro_batch: int | None = None
    """Conversations per forward and backward pass at most, of those as long as the longest; divides
    the batch. None takes the divisor nearest to 64. Changes memory and speed, and the result only
    by the rounding of sums."""

    learning_rate: float = 2e-5
    """Learning rate. Adapters (--lora-rank) need about ten times more."""
    learning_rate_schedule: Schedule = "cosine"
    """Schedule after the warm-up: constant, a linear or cosine decay to the final rate at the last
    step of the run, or wsd, constant and then a linear decay at the end. More steps of a resumed
    run stretch it."""

    max_length: int | None = setting(None, sampled=True)
    """Maximum tokens of a conversation; None is the longest of the data, or what the checkpoint's
    positions allow."""
    overlong: Literal["drop", "truncate"] = setting("drop", sampled=True)
    """Conversations with more tokens: drop them, or truncate them at the end. Both are counted."""
    learn: Literal["all", "last"] = setting("all", sampled=True)
    """Assistant turns in the loss mask: all, or the last of each conversation."""

    def __post_init__(self):
        # Before the checks of every recipe, which compute with these.
        check_settings(self)
        if self.batch % self.micro_batch_size:
            raise ValueError(
                f"micro_batch={self.micro_batch} does not divide batch={self.batch}: choose a "
                "divisor."
            )
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"max_length={self.max_length} leaves no token to predict from another: give at "
                "least 2."
            )

    @property
    def completions(self) -> int:
        return self.batch

    @property
    def rows_decoded(self) -> int:
        return ROWS_SHOWN

    @property
    def mini_batch_size(self) -> int:
        return self.batch

    def divided(self, ranks: int) -> "Sft":
        # Its batch is set by the user, whatever the number of devices.
        return self

    @property
    def updates_per_step(self) -> int:
        # Epochs are passes over the data, not over a batch.
        return 1

    @property
    def supervision(self) -> Supervision:
        return Supervision(self.max_length, self.overlong == "truncate", self.learn == "last")

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        return Targets(jnp.ones(batch.mask.shape, jnp.float32))

    def surrogate(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
        statistics: Any = None,
    ) -> tuple[Float[Array, "batch time"], Metrics]:
        # No ratio: the tokens are given, and no policy of ours has sampled them.
        return -logprobs, {"nll": Mean.of(-logprobs, batch.mask)}
