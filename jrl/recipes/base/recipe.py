"""What every recipe has beside its hyperparameters: the hooks of an algorithm.

A recipe is a frozen record of hyperparameters with a few hooks, each with a default. The trainer
asks for the hooks and never for a class: what to collect (`collection`), the rewards (`rewards`),
advantages and returns (`targets`), the loss of each token (`surrogate`), what it is divided by
(`denominators`), what else is to be minimised (`auxiliary_loss`), how the temperature of sampling
follows the policy (`temperature_rule`), and the statistics by which it does (`entropy_statistics`).
Entropy and KL terms, importance weights and rejection masks are the trainer's, for every recipe
alike.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from jrl.losses import (
    Denominators,
    EntropyStatistics,
    ExplainedVariance,
    Mean,
    ppo_loss,
)
from jrl.recipes.base.batch import Batch, Targets, Totals, given
from jrl.recipes.base.collection import Collection, DynamicSampling, OneRound, Supervision, Windows
from jrl.recipes.base.hyperparameters import Hyperparameters
from jrl.recipes.base.mismatch import (
    Correction,
    Denominator,
    checked,
)
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.temperature import AdaptiveTemperature

Metrics = Mapping[str, Mean | Array]
"""Means, and scalars that add up over micro-batches."""


@dataclass(frozen=True)
class Recipe(Hyperparameters):
    """Hyperparameters, and the hooks of an algorithm."""

    supervised: ClassVar[bool] = False
    """Whether it learns from conversations that are given, and samples to show alone."""
    uses_critic: ClassVar[bool] = False
    """Whether the recipe trains a value network: `ActorCritic` has the hooks for that."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """What metrics of the recipe's own mean, by their names, such as "actor/gate"."""
    # Static: bound to the recipe, it would take that for its log-probabilities.
    policy_loss: ClassVar[Callable[..., tuple[Any, Metrics]]] = staticmethod(ppo_loss)
    """A loss of `jrl.losses` of log-probabilities, old ones, advantages and mask."""
    uses_statistics: ClassVar[bool] = False
    """Whether `surrogate` needs `statistics` of the whole mini-batch, which cost a forward pass."""

    def __post_init__(self):
        # Told now and not by the first step that asks, which comes after the whole warm start.
        needed = ["targets", *(["statistics"] if self.uses_statistics else [])]
        for hook in [*needed, *(["critic_loss"] if self.uses_critic else [])]:
            if getattr(type(self), hook) is getattr(Recipe, hook):
                raise ValueError(
                    f"{type(self).__name__} says nothing of its {hook}: write a method {hook}, as "
                    "jrl.recipes.Recipe describes it."
                )
        super().__post_init__()
        # After the numbers, of which hooks make what is checked here.
        checked(self.correction, self.old_logprobs)

    @property
    def name(self) -> str:
        """As it is called on the command line: the words of the class, `DrGrpo` is dr_grpo."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def correction(self) -> Correction:
        """Of the mismatch between sampler and trainer."""
        # Without a weighting a denominator has no effect, and would be refused.
        own = None if self.mismatch is None else self.default_denominator
        return Correction(
            weighting=self.mismatch,
            level=self.mismatch_level,
            denominator=self.mismatch_denominator or own,
            low=self.mismatch_low,
            high=self.mismatch_high,
            mean=self.mismatch_mean,
            rejection=self.rejection,
            over=self.rejection_over,
            reject_below=self.rejection_low,
            reject_above=self.rejection_high,
        )

    @property
    def default_denominator(self) -> Denominator:
        """What weights divide by where nobody chose it, see `mismatch_denominator`."""
        # At a temperature of its own a token comes from another distribution than that of the
        # ratio: a weight over the whole policy would leave that uncorrected.
        return "policy" if self.temperature_rule is None else "drawn"

    @property
    def rescores(self) -> bool:
        """Whether the trainer scores the completions by its policy before the first update."""
        # Each of these wants what the trainer says before the first update moves it: one pass
        # serves them all.
        needed = self.correction.compares or self.temperature_rule is not None
        return needed or self.old_logprobs == "recompute" or self.router_replay == "R2"

    @property
    def temperature_rule(self) -> AdaptiveTemperature | None:
        """How the temperature of sampling follows the entropy of the policy, with `temperature` for
        its base; None leaves it there. A recipe with a rule is asked for `entropy_statistics`."""
        return None

    @property
    def uses_reference(self) -> bool:
        """Whether the policy at the start of training is kept for a KL term."""
        # Asked for before training: afterwards the policy that it started from is gone.
        return self.kl_coef is not None

    @property
    def value_pretraining_steps(self) -> int:
        """Steps at the start in which only the critic learns."""
        return 0

    @property
    def critic_optimizer(self) -> Optimizer:
        """Of the critic, where there is one."""
        return self.optimizer

    @property
    def discount(self) -> float:
        """Per token, of the returns that a critic foresees."""
        return 1.0

    @property
    def length_adaptive_alpha(self) -> float | None:
        """The alpha of a lambda that adapts to the length of a response; None where it does not."""
        return None

    def policy_lambda(self, lengths: Int[Array, "batch"]) -> float | Float[Array, "batch 1"]:
        """The lambda behind the policy's advantages, one for all or one for each response.

        Args:
          lengths: sampled tokens of each response.

        Raises:
          ValueError: where the recipe does not say.
        """
        raise ValueError(
            f"recipe {self.name} does not say with which lambda it makes advantages: write a "
            "method policy_lambda, as jrl.recipes.Recipe describes it."
        )

    @property
    def supervision(self) -> Supervision | None:
        """What is learned of conversations that are given; None where none are."""
        return None

    def steps_of(self, conversations: int) -> int:
        """Steps that `epochs` passes over so many conversations take."""
        # The last batch is a whole one: rounded down, some would never be learned from.
        return -(-self.epochs * conversations // self.completions)

    def fitted(self, response_length: int) -> "Recipe":
        """The recipe with what depends on the limit of a completion, in tokens, where nobody
        chose it."""
        return self

    @property
    def collection(self) -> Collection:
        """What a step collects before it learns."""
        if self.dynamic_sampling:
            return DynamicSampling(self.max_generation_rounds)
        return OneRound()

    @property
    def whole_groups(self) -> bool:
        """Whether the completions of a step are whole groups, one after the other; those written in
        windows finish when they do."""
        # What shares prompts in a pass, shuffles groups or reports by group asks this first.
        return not isinstance(self.collection, Windows)

    def rewards(
        self, scores: Float[Array, "batch"], lengths: Int[Array, "batch"], response_length: int
    ) -> Float[Array, "batch"]:
        """The reward of each completion.

        Args:
          scores: from the verifier, in [0, 1].
          lengths: tokens of each completion, end-of-sequence included; of a conversation those of
            both sides.
          response_length: the limit of a completion, in tokens.
        """
        # A straight line, so that partial marks keep their order; between 0 and 1 scores stay as
        # they are.
        return self.reward_wrong + (self.reward_correct - self.reward_wrong) * scores

    def entropy_statistics(self, batch: Batch[Array]) -> EntropyStatistics[Array] | None:
        """What is kept from this step to the next, in checkpoints too, for the sampler to read:
        entropy statistics over all sampled tokens that count; None without a `temperature_rule`.

        Args:
          batch: of a whole step before its updates, with `old_entropy`, nothing rejected.
        """
        # A state of its own in checkpoints: nothing is stored that nobody will read.
        if self.temperature_rule is None:
            return None
        # Of all that counts, before anything is rejected: the sampler draws what is rejected too.
        return self.temperature_rule.statistics(given(batch.old_entropy), batch.mask)

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        """Advantages for the policy and, with a critic, returns for the critic.

        Args:
          batch: the whole batch of a step, with what sampler, verifier and networks say of it.
        """
        # There is no default to fall back on in silence; `__post_init__` has refused a recipe
        # without.
        raise NotImplementedError

    @property
    def policy_loss_settings(self) -> dict[str, Any]:
        """Keywords of `policy_loss`."""
        # By name, so that a recipe with another loss gives other keywords and no positions are
        # counted.
        names = "clip_low", "clip_high", "clip_dual"
        return {name: getattr(self, name) for name in names}

    def statistics(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
    ) -> Any:
        """What `surrogate` must know of a whole mini-batch, such as a quantile over its tokens.

        Asked for before each update where `uses_statistics`, outside of the gradient.

        Args:
          logprobs: of the current policy.
          entropy: of the current policy's distribution over each token.
          batch: the mini-batch.
        """
        raise NotImplementedError

    def surrogate(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
        statistics: Any,
    ) -> tuple[Float[Array, "batch time"], Metrics]:
        """The loss of each token, and metrics; by default those of `policy_loss`.

        Args:
          logprobs: of the current policy.
          entropy: of the current policy's distribution over each token.
          batch: any micro-batch of the mini-batch.
          statistics: what `statistics` gave; None without.
        """
        # Not aggregated: the trainer reduces, with denominators of the mini-batch.
        arrays = logprobs, given(batch.old_logprobs), given(batch.advantages), batch.mask
        return self.policy_loss(*arrays, **self.policy_loss_settings, aggregation=None)

    def denominators(self, totals: Totals[Array], response_length: int) -> Denominators:
        """What `jrl.losses.aggregate` divides by, for the policy's loss and the critic's.

        Args:
          totals: counts over the whole mini-batch.
          response_length: the limit of a completion, in tokens.
        """
        # All of them: each aggregation reads the one that it needs.
        return {
            "num_tokens": totals.num_tokens,
            "num_sequences": totals.num_sequences,
            "max_length": response_length,
        }

    def auxiliary_loss(
        self,
        logprobs: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
    ) -> tuple[Float[Array, ""] | None, Metrics]:
        """What is added to the policy's loss, this micro-batch's share of it; None adds nothing."""
        return None, {}

    def critic_loss(
        self,
        values: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
        response_length: int,
    ) -> tuple[Float[Array, ""], dict[str, Mean | ExplainedVariance]]:
        """A micro-batch's share of the critic's loss, and metrics; asked for where `uses_critic`.

        Args:
          values: of the critic as it is now.
          batch: any micro-batch of the mini-batch, the critic's own mask in it.
          totals: counts over the whole mini-batch.
          response_length: the limit of a completion, in tokens.
        """
        raise NotImplementedError
