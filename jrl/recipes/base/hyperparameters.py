"""Hyperparameters of a recipe, and the batch sizes that follow from them."""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from jrl.losses import Aggregation, RejectionOver, WeightLevel, WeightMean
from jrl.recipes.base.mismatch import Denominator, OldLogprobs, Rejection, Weighting
from jrl.recipes.base.optimizer import Optimizer, OptimizerName, Schedule
from jrl.setting import check_settings, setting

MINI_BATCH, MICRO_BATCH = 128, 64
"""Default sizes, to which mini-batches and micro-batches are near."""

RouterReplay = Literal["R2", "R3"]
"""Source of the replayed expert ids: R2 the trainer, R3 the sampler."""


RecipeType = TypeVar("RecipeType", bound="Hyperparameters")


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters that all recipes share."""

    prompts: int = setting(64, minimum=1, sft=False, sampled=True)
    """Prompts per step."""
    group_size: int = setting(8, minimum=1, sft=False, sampled=True)
    """Completions sampled per prompt."""
    mini_batch: int | None = setting(None, minimum=1, sft=False, sampled=True)
    """Completions per optimizer step; divides prompts x group_size. None takes the divisor nearest
    to 128."""
    micro_batch: int | None = setting(None, minimum=1, changeable=True, sampled=True)
    """Completions per forward and backward pass at most; divides the mini-batch. None takes the
    divisor nearest to 64. Changes memory and speed (small ones stay in a CPU's cache), and the
    result only by the rounding of sums."""
    epochs: int = setting(1, minimum=1)
    """Passes over the completions of a step."""

    optimizer: OptimizerName = "adamw"
    """Optimizer of policy, critic and warm start. Muon trains matrices by it and all other weights
    (norms, embedding, LM head, router, biases, adapters) by Adam. The rate of Adafactor is relative
    to the size of each weight."""
    learning_rate: float = setting(2e-4, minimum=0)
    """Learning rate of the policy."""
    learning_rate_warmup: int = setting(0, minimum=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    learning_rate_schedule: Schedule = "constant"
    """Schedule after the warm-up: constant, a linear or cosine decay to the final rate at the last
    step of the run, or wsd, constant and then a linear decay at the end. More steps of a resumed
    run stretch it."""
    learning_rate_final: float = setting(0.0, minimum=0, maximum=1)
    """The rate of the last step as a fraction of the learning rate."""
    learning_rate_decay: float = setting(0.1, above=0, maximum=1)
    """Fraction of the optimizer steps in which wsd decays the rate."""
    beta1: float | None = setting(None, minimum=0)
    """Decay rate of the first moment of AdamW and Lion, and of the Adam beside Muon; None is
    0.9."""
    beta2: float | None = setting(None, minimum=0)
    """Decay rate of the second moment of AdamW and of the Adam beside Muon, None is 0.999; for Lion
    of its momentum, None is 0.99."""
    epsilon: float | None = setting(None, above=0)
    """Term of the optimizer's denominator; None is 1e-8 for AdamW and Muon, 1e-30 for Adafactor."""
    momentum: float | None = setting(None, minimum=0)
    """Decay rate of the momentum of Muon, None is 0.95; of SGD and Adafactor, None is off."""
    weight_decay: float = setting(0.0, minimum=0)
    """Decoupled weight decay: a step subtracts this times the learning rate times the weight."""
    max_grad_norm: float = setting(1.0, above=0)
    """Gradient clipping: gradients are scaled down to this global norm."""

    temperature: float = setting(1.0, minimum=0, sft=False, sampled=True)
    """Sampling temperature. The losses use log-probabilities at the same temperature."""
    top_k: int | None = setting(None, sft=False, sampled=True)
    """Sample among this many most probable tokens (top-k); None is off."""
    top_p: float | None = setting(None, sft=False, sampled=True)
    """Sample from the smallest set of most probable tokens with this probability (top-p); None is
    off."""

    dynamic_sampling: bool = setting(False, sft=False)
    """Replace groups whose completions all have the same score by groups of further prompts."""
    max_generation_rounds: int = setting(10, minimum=1, sft=False)
    """Maximum batches of prompts sampled to fill a step with groups of unequal scores, with dynamic
    sampling."""

    old_logprobs: OldLogprobs = setting("sampler", sft=False)
    """Old log-probabilities of the ratios: from the sampler, or recomputed by the trainer before
    its first update."""
    overlong_filter: bool = setting(False, sft=False)
    """Exclude completions truncated by the length limit from the policy's loss: they were
    interrupted and not judged. Their rewards stay in their group's baseline, and a critic is
    trained on them."""

    mismatch: Weighting | None = setting(None, sft=False)
    """Importance weights on the tokens' losses, of the trainer's policy over the sampler's, which
    may differ slightly: clamped to a range ("truncated"), 0 outside of it ("icepop"), or 0 on
    sequences whose mean is outside of it ("sequence-masked"); None is off."""
    mismatch_denominator: Denominator | None = setting(None, sft=False)
    """Sampler probabilities that weights divide by: of its full policy at the base temperature
    ("policy"), or of the distribution that the token was sampled from, after top-k and top-p and at
    a temperature that adapts ("drawn"). None is "drawn" in recipes whose temperature adapts and
    "policy" in others."""
    mismatch_level: WeightLevel = setting("token", sft=False)
    """Level of the weights: of each token, of its sequence, or a geometric mean over the
    sequence."""
    mismatch_low: float | None = setting(None, sft=False)
    """Lower end of the weights' range, before `mismatch_mean`; of geometric means if
    sequence-masked. 0 is no bound, None is 0 if truncated and 0.5 otherwise."""
    mismatch_high: float | None = setting(None, sft=False)
    """Upper end of that range; None is 2 if truncated and 5 otherwise."""
    mismatch_mean: WeightMean | None = setting(None, sft=False)
    """Divide the weights by their mean over the step's tokens or over its sequences; None is
    off."""
    rejection: Rejection | None = setting(None, sft=False)
    """Mask samples that are too far from the trainer's policy, by the geometric mean of a
    sequence's weights or by a divergence estimated with k2 or k3; None is off."""
    rejection_over: RejectionOver = setting("mean", sft=False)
    """Level at which a divergence is bounded: each token, or the sum, mean or maximum over a
    sequence."""
    rejection_low: float | None = setting(None, sft=False)
    """The least geometric mean that is kept; None is 0.999."""
    rejection_high: float | None = setting(None, sft=False)
    """The greatest that is kept; None is 1.001 of a geometric mean, 0.01 nats of a divergence."""

    router_replay: RouterReplay | None = setting(None, sft=False)
    """Send each token to the same experts in every policy pass of a training step, with the
    router's current scores: "R2" to those that the trainer chose before its first update, which
    takes a pass over the completions, "R3" to those that the sampler chose. None routes again in
    each pass. For MoE policies."""

    clip_low: float = setting(0.2, minimum=0, sft=False)
    """How far the probability ratio may fall below 1."""
    clip_high: float = setting(0.2, minimum=0, sft=False)
    """How far it may rise above 1."""
    clip_dual: float | None = setting(None, above=1, sft=False)
    """Bound of the loss at negative advantages, in ratios (above 1); None is off."""
    aggregation: Aggregation = setting(
        "token-mean",
        sft="Aggregation of token losses: token-mean weighs all loss tokens equally, the others "
        "each conversation.",
    )
    """Aggregation of token losses to one loss."""
    entropy_coef: float | None = setting(None, sft=False)
    """Weight of the entropy bonus; None is off."""
    kl_coef: float | None = setting(None, sft=False)
    """Weight of the KL loss towards the policy that training started from (k3 estimator); None is
    off."""

    teacher: str | None = setting(None, sft=False)
    """Teacher of on-policy distillation, a run folder or a published checkpoint with the tokens of
    the policy: advantages get how much likelier a sampled token is under it than under the
    policy."""
    teacher_coef: float = setting(1.0, minimum=0.0, before=0.0, sft=False)
    """Weight of the teacher's term in the advantages; 0 is no teacher."""
    teacher_baseline: Literal["none", "kl"] = setting("none", sft=False)
    """Baseline of the teacher's term: none, or the closed-form KL divergence of each token, which
    removes variance and takes a pass of the policy."""
    teacher_layout: str | None = setting(None, sft=False)
    """Layout of the teacher on as many devices as the policy, for example tp2; None is the
    policy's."""
    teacher_dtype: Literal["float32", "bfloat16"] | None = setting(None, sft=False)
    """Dtype of the teacher; None is the one that the run sets or else its checkpoint's own."""

    reward_correct: float = setting(1.0, sft=False)
    """Reward of a completion with full score."""
    reward_wrong: float = setting(0.0, sft=False)
    """Reward of a completion with score 0; rewards of partial scores are in between."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        if isinstance(cls.__dict__.get("optimizer"), property):
            raise TypeError(
                f"{cls.__name__}.optimizer is a property, and optimizer is a field, the name of an "
                "optimizer: rename the property to policy_optimizer."
            )

    def __post_init__(self):
        check_settings(self)
        # Raises for settings that do not fit together.
        _ = self.policy_optimizer
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} leaves nothing to compare a completion with, and "
                "dynamic_sampling would drop them all: choose at least 2, or leave it off."
            )
        for name in ("teacher_baseline", "teacher_layout", "teacher_dtype"):
            if getattr(self, name) not in (None, "none") and self.teacher is None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} changes nothing without a teacher: give "
                    "--teacher, or leave it out."
                )
        if self.router_replay not in (None, *get_args(RouterReplay)):
            raise ValueError(
                f"router_replay={self.router_replay!r} is neither R2 (the trainer's experts) nor "
                "R3 (the sampler's experts): choose one, or None."
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

    def divided(self: RecipeType, ranks: int) -> RecipeType:
        """Copy of the recipe with a mini-batch that divides over `ranks` devices, unless it has one
        of its own or none does. A run keeps it when it is resumed on another number of devices."""
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
        """Default number of completions that are sampled at a time."""
        return self.completions

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.epochs * (self.completions // self.mini_batch_size)

    @property
    def policy_optimizer(self) -> Optimizer:
        """Optimizer of the policy, with the optimizer steps of the run left open."""
        return Optimizer(
            self.learning_rate,
            self.learning_rate_warmup,
            self.weight_decay,
            self.max_grad_norm,
            schedule=self.learning_rate_schedule,
            final=self.learning_rate_final,
            decay=self.learning_rate_decay,
            name=self.optimizer,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            momentum=self.momentum,
        )


def near_divisors(total: int, aim: int) -> list[int]:
    """All divisors of `total`, those nearest to `aim` in ratio first; of two, the smaller.

    Examples:
      >>> near_divisors(80, 64)[:3]
      [80, 40, 20]
    """
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    return sorted(divisors, key=lambda size: (abs(math.log(size / aim)), size))
