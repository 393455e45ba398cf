"""T-PPO: partial rollouts in windows of tokens, with an update of the policy after each window.

A step continues every response for a window of tokens; unfinished ones continue in the next. The
policy is trained on the tokens of the window only, by an advantage that does not need the end of
the response (extended GAE), so that no step waits for the longest. The critic is trained on
finished responses only, on all their tokens, by Monte-Carlo returns.

References:
  Fan et al., "Truncated Proximal Policy Optimization", 2025. https://arxiv.org/abs/2506.15050
  The authors' implementation, a pull request to verl: the length-adaptive lam with its floor, the
  tokens that are ignored, whitening, clamp and value clip. https://github.com/verl-project/verl/pull/3728
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.losses import (
    Aggregation,
    effective_length,
    extended_gae,
    gae,
    length_adaptive_lambda,
    whiten,
)
from jrl.losses.settings import Sides
from jrl.recipes.base.batch import Batch, Targets, required, responses_of, terminal_rewards
from jrl.recipes.base.recipe import Windows
from jrl.recipes.ppo import ImitatingActorCritic
from jrl.setting import setting


@dataclass(frozen=True)
class Tppo(ImitatingActorCritic):
    """T-PPO; rules of the paper and its implementation, sizes that fit a laptop."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregation: Aggregation = "token-mean"
    reward_correct: float = 1.0
    reward_wrong: float = -1.0
    value_clip: float | None = 0.5
    """Clip range of the value loss: how far a value may fall below its old one before its gradient
    stops; None is off."""
    value_clip_up: float | None = 0.6
    """How far it may rise above; None is as far as it may fall."""
    pretrain_critic: int = 20
    """Steps at the start that train only the critic, on returns of the frozen policy."""

    window: int | None = setting(None, minimum=1)
    """Maximum tokens of a response that a step samples; below the maximum length of a response.
    None is three quarters of that: of a continued response, tokens before the last window are
    judged only by the critic, so most should end in their first. The paper has 8192 of 24576."""
    ignore_last: int = 8
    """Tokens at the end of the window of an unfinished response that the policy is not trained on,
    at most a quarter of the window: they depend most on the critic's value at the truncation."""
    lam_alpha: float = 0.05
    """The policy's lam is 1 - 1 / (lam_alpha x response length), the length of an unfinished one
    taken for half a window more."""
    lam_floor: float = setting(0.95, minimum=0, maximum=1)
    """The least lam: with lam_alpha 0.05 it holds up to 400 tokens."""
    lam_critic: float = setting(1.0, minimum=0, maximum=1)
    """Lambda of the critic's targets; 1 makes them Monte-Carlo returns."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1."""
    advantage_clip: float | None = 10.0
    """Bound of advantages either way, after whitening; None is off."""

    def __post_init__(self):
        super().__post_init__()
        if self.ignore_last < 0:
            raise ValueError(f"ignore_last={self.ignore_last} must not be negative: 0 keeps all.")
        if not self.lam_alpha > 0:
            raise ValueError(f"lam_alpha={self.lam_alpha} must be positive: the paper has 0.05.")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip={self.advantage_clip} must be positive: None is off.")
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling=True needs complete groups in a step, and with windows the "
                "completions of a group finish in different steps: leave it off."
            )

    @property
    def collection(self) -> Windows:
        return Windows(self.window)

    def fitted(self, response_length: int) -> "Tppo":
        # Only here is the limit of a response known.
        return self if self.window else replace(self, window=3 * response_length // 4)

    @property
    def value_clip_sides(self) -> Sides | None:
        if self.value_clip is None:
            return None
        up = self.value_clip if self.value_clip_up is None else self.value_clip_up
        return self.value_clip, up

    @property
    def length_adaptive_alpha(self) -> float:
        return self.lam_alpha

    @property
    def num_ignored(self) -> int:
        """Tokens at the end of an unfinished window that are masked out of the policy's loss."""
        # A window of fewer tokens than are ignored would leave nothing to train on.
        return min(self.ignore_last, required(self.window) // 4)

    def policy_lambda(self, lengths: Int[Array, "batch"]) -> Float[Array, "batch 1"]:
        return self._lambda(lengths, jnp.zeros_like(lengths, bool))

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        # Lengths are of whole responses so far, the mask is of this window only.
        values, lengths = required(batch.old_values), required(batch.lengths)
        rewards, finished = required(batch.rewards), batch.finished
        # Responses that continue in another step.
        unfinished = jnp.zeros_like(lengths, bool) if finished is None else ~finished
        # A cut is no end: the value after it is taken to be that before the last token (the paper's
        # assumption), where GAE would use 0 and punish every unfinished response.
        advantages, _, policy_mask = extended_gae(
            # Unfinished responses are not scored: their reward is 0, and so is the one here.
            terminal_rewards(rewards, batch.mask),
            values,
            batch.mask,
            unfinished,
            gamma=self.gamma,
            lam=self._lambda(lengths, unfinished),
            ignore_last=self.num_ignored,
        )
        if self.whiten_advantages:
            # Without the ignored tokens, which are 0 by rule and would narrow the variance.
            advantages = whiten(advantages, policy_mask)
        if self.advantage_clip is not None:
            advantages = jnp.clip(advantages, -self.advantage_clip, self.advantage_clip)
        # The whole response, including tokens that other steps sampled.
        critic_mask = responses_of(batch) & ~unfinished[:, None]
        rewards = terminal_rewards(rewards, critic_mask)
        # From the end of the response back to its first token, over all windows; at lam 1 the
        # values cancel, and the target is the reward-to-go.
        _, returns = gae(rewards, values, critic_mask, gamma=self.gamma, lam=self.lam_critic)
        # The policy is trained on windows, the critic on finished responses: two masks.
        return Targets(advantages, returns, mask=policy_mask, critic_mask=critic_mask)

    def _lambda(
        self, lengths: Int[Array, "batch"], unfinished: Bool[Array, "batch"]
    ) -> Float[Array, "batch 1"]:
        # An unfinished response is assumed to be half a window longer: it ends somewhere in the
        # next one.
        expected = effective_length(lengths, unfinished, window=required(self.window))
        return length_adaptive_lambda(expected, alpha=self.lam_alpha, floor=self.lam_floor)[:, None]

    @classmethod
    def paper(cls) -> "Tppo":
        """512 prompts x 16 in mini-batches of 512, windows of 8k tokens out of 24k."""
        return replace(
            cls(),
            prompts=512,
            group_size=16,
            mini_batch=512,
            micro_batch=512,
            learning_rate=1e-6,
            critic_learning_rate=2e-6,
            pretrain_critic=10,
            window=8192,
            lam_alpha=0.05,
            lam_floor=0.95,
            positive_coef=0.1,
        )
