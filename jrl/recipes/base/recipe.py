"""What every recipe has: batch arithmetic, optimizer, sampling, and the hooks of an algorithm.

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
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from jaxtyping import Array, Float, Int

from jrl.config.numbers import check_least
from jrl.losses import (
    Aggregation,
    Denominators,
    EntropyStatistics,
    Mean,
    RejectionOver,
    WeightLevel,
    WeightMean,
    ppo_loss,
)
from jrl.recipes.base.batch import Batch, Targets, Totals, given
from jrl.recipes.base.collection import Collection, DynamicSampling, OneRound, Windows
from jrl.recipes.base.mismatch import (
    Correction,
    Denominator,
    OldLogprobs,
    Rejection,
    Weighting,
    checked,
)
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.sizes import MICRO_BATCH, MINI_BATCH, near_divisors
from jrl.recipes.base.temperature import AdaptiveTemperature

Metrics = Mapping[str, Mean | Array]
"""Means, and scalars that add up over micro-batches."""

RouterReplay = Literal["R2", "R3"]
"""Whose choices of experts are replayed."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters shared by all recipes."""

    prompts: int = 64
    """Prompts per step."""
    group_size: int = 8
    """Completions sampled per prompt."""
    mini_batch: int | None = None
    """Completions per optimizer step; divides prompts x group_size. None takes the divisor nearest
    to 128."""
    micro_batch: int | None = None
    """Completions per forward and backward pass at most; divides the mini-batch. None takes the
    divisor nearest to 64. Changes memory and speed (small ones stay in a CPU's cache), not the
    result: sums are in another order, which shows in the last digits."""
    epochs: int = 1
    """Passes over the completions of a step."""

    learning_rate: float = 2e-4
    """Of AdamW, for the policy."""
    learning_rate_warmup: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    """Decoupled, of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    temperature: float = 1.0
    """Of sampling. The losses use log-probabilities at the same temperature."""
    top_k: int | None = None
    """Sample among this many likeliest tokens; None is off."""
    top_p: float | None = None
    """Sample from the smallest set of likeliest tokens with this probability; None is off."""

    dynamic_sampling: bool = False
    """Replace groups whose completions all score alike by groups of further prompts."""
    max_generation_rounds: int = 10
    """Batches of prompts sampled at most to fill a step with groups of unequal scores, where
    sampling is dynamic."""

    old_logprobs: OldLogprobs = "sampler"
    """Log-probabilities that ratios are taken against: as the sampler gave them, or computed again
    by the trainer before its first update."""
    overlong_filter: bool = False
    """Leave completions that the length limit ended out of the policy's loss: they were interrupted
    and not judged. Their rewards stay in their group's baseline, and a critic learns from them."""

    mismatch: Weighting | None = None
    """Importance weights on the tokens' losses, of the trainer's policy over the sampler's, which
    should agree and may not quite: clamped to a range ("truncated"), 0 outside of it ("icepop"), or
    0 on sequences whose mean is outside of it ("sequence-masked"); None is off."""
    mismatch_denominator: Denominator | None = None
    """Which of the sampler's probabilities weights divide by: of its whole policy at the base
    temperature ("policy"), or of the distribution that the token was drawn from, after top-k and
    top-p and at a temperature that adapts ("drawn"). None is "drawn" in recipes whose temperature
    adapts and "policy" in others."""
    mismatch_level: WeightLevel = "token"
    """Whether weights are of each token, of its whole sequence, or a geometric mean over that."""
    mismatch_low: float | None = None
    """The least weight; 0 is no bound, None is 0 if truncated and 0.5 otherwise."""
    mismatch_high: float | None = None
    """The greatest weight; None is 2 if truncated and 5 otherwise."""
    mismatch_mean: WeightMean | None = None
    """Divide the weights by their mean over the step's tokens or over its sequences; None is
    off."""
    rejection: Rejection | None = None
    """Leave out what the sampler drew too far from the trainer's policy, by the geometric mean of a
    sequence's weights or by a divergence estimated with k2 or k3; None is off."""
    rejection_over: RejectionOver = "mean"
    """What a divergence is bounded of: each token, or the sum, mean or maximum over a sequence."""
    rejection_low: float | None = None
    """The least geometric mean that is kept; None is 0.999."""
    rejection_high: float | None = None
    """The greatest that is kept; None is 1.001 of a geometric mean, 0.01 nats of a divergence."""

    router_replay: RouterReplay | None = None
    """Send each token to the same experts in every pass of the policy that a step learns from, with
    the router's current scores: "R2" to those that the trainer chose before its first update, which
    takes a pass over the completions, "R3" to those that the sampler chose. None chooses anew in
    each pass. For policies with experts."""

    clip_low: float = 0.2
    """How far the probability ratio may fall below 1."""
    clip_high: float = 0.2
    """How far it may rise above 1."""
    clip_dual: float | None = None
    """Bound of the loss at negative advantages, in ratios (above 1); None is off."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one loss."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus; None is off."""
    kl_coef: float | None = None
    """Weight of the KL loss towards the policy that training started from (k3 estimator); None is
    off."""

    reward_correct: float = 1.0
    """Reward of a completion with full marks."""
    reward_wrong: float = 0.0
    """Reward of a completion with no marks; partial marks lie in between."""

    supervised: ClassVar[bool] = False
    """Whether it learns from conversations that are given, and samples to show alone."""
    uses_critic: ClassVar[bool] = False
    """Whether the recipe trains a value network: it is then an `ActorCritic`."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """What metrics of the recipe's own mean, by their names, such as "actor/gate"."""
    policy_loss: ClassVar[Callable[..., tuple[Any, Metrics]]] = staticmethod(ppo_loss)
    """A loss of `jrl.losses` of log-probabilities, old ones, advantages and mask."""
    uses_statistics: ClassVar[bool] = False
    """Whether `surrogate` needs `statistics` of the whole mini-batch, which cost a forward pass."""

    def __post_init__(self):
        needed = ["targets", *(["statistics"] if self.uses_statistics else [])]
        for hook in needed:
            if getattr(type(self), hook) is getattr(Recipe, hook):
                raise ValueError(
                    f"{type(self).__name__} says nothing of its {hook}: write a method {hook}, as "
                    "jrl.recipes.Recipe describes it."
                )
        counts = ("prompts", "group_size", "mini_batch", "micro_batch", "epochs")
        check_least(self, (*counts, "max_generation_rounds"))
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} leaves nothing to compare a completion with, and "
                "dynamic_sampling would drop them all: choose at least 2, or leave it off."
            )
        checked(self.correction, self.old_logprobs)
        if self.router_replay not in (None, *get_args(RouterReplay)):
            raise ValueError(
                f"router_replay={self.router_replay!r} is neither R2 (what the trainer chose) nor "
                "R3 (what the sampler chose): choose one, or None."
            )
        if self.mini_batch is not None and self.completions % self.mini_batch:
            raise ValueError(
                f"mini_batch={self.mini_batch} does not divide prompts x group_size = "
                f"{self.prompts} x {self.group_size} = {self.completions} completions: "
                "choose a divisor."
            )
        if self.mini_batch_size % self.micro_batch_size:
            raise ValueError(
                f"micro_batch={self.micro_batch} does not divide "
                f"mini_batch={self.mini_batch_size}: choose a divisor."
            )

    @property
    def name(self) -> str:
        """As it is called on the command line: the words of the class, `DrGrpo` is dr_grpo."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def mini_batch_size(self) -> int:
        """Completions per optimizer step."""
        if self.mini_batch is None:
            # Four updates a step at the defaults: enough for the clip to matter.
            return near_divisors(self.completions, MINI_BATCH)[0]
        return self.mini_batch

    @property
    def micro_batch_size(self) -> int:
        """Completions per forward and backward pass."""
        if self.micro_batch is None:
            return near_divisors(self.mini_batch_size, MICRO_BATCH)[0]
        return min(self.micro_batch, self.mini_batch_size)

    def divided(self, ranks: int) -> "Recipe":
        """The recipe with a mini-batch that divides over `ranks` devices, unless it has one of its
        own or none does: what a run keeps when it goes on with another number of them."""
        if self.mini_batch is not None:
            return self
        near = near_divisors(self.completions, MINI_BATCH)
        mini_batch = next((size for size in near if size % ranks == 0), near[0])
        return replace(self, mini_batch=mini_batch)

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.prompts * self.group_size

    @property
    def rows_decoded(self) -> int:
        """Completions that are sampled at a time where nobody says how many."""
        return self.completions

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
        return "policy" if self.temperature_rule is None else "drawn"

    @property
    def rescores(self) -> bool:
        """Whether the trainer scores the completions by its policy before the first update."""
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
        return self.kl_coef is not None

    @property
    def value_pretraining_steps(self) -> int:
        """Steps at the start in which only the critic learns."""
        return 0

    @property
    def optimizer(self) -> Optimizer:
        """Of the policy."""
        return Optimizer(
            self.learning_rate, self.learning_rate_warmup, self.weight_decay, self.max_grad_norm
        )

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
        return self.reward_wrong + (self.reward_correct - self.reward_wrong) * scores

    def entropy_statistics(self, batch: Batch[Array]) -> EntropyStatistics[Array] | None:
        """What is kept from this step to the next, in checkpoints too, for the sampler to read:
        entropy statistics over all sampled tokens that count; None without a `temperature_rule`.

        Args:
          batch: of a whole step before its updates, with `old_entropy`, nothing rejected.
        """
        if self.temperature_rule is None:
            return None
        return self.temperature_rule.statistics(given(batch.old_entropy), batch.mask)

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        """Advantages for the policy and, with a critic, returns for the critic.

        Args:
          batch: the whole batch of a step, with what sampler, verifier and networks say of it.
        """
        raise NotImplementedError

    @property
    def policy_loss_settings(self) -> dict[str, Any]:
        """Keywords of `policy_loss`."""
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
