"""The losses and advantages of `verl.trainer.ppo.core_algos`."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from ..frameworks import NotExpressed

OFF = 1e30
"""A cap of dual clip that no ratio reaches: verl has no switch for it."""


def number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        raise NotExpressed(f"{name} is one number there")
    return OFF if value is None else float(value)


def _policy_loss(
    name: str, usual: str, *, dual: bool = False, low: float | None = 0.2, modes: bool = True
) -> Callable[..., torch.Tensor]:
    """A loss of verl's registry. The old policy comes first there, and the mask is of floats.

    Args:
      name: there.
      usual: how it is reduced.
      dual: if it has a dual clip.
      low: the lower bound of a case that has none.
      modes: if it is reduced in other ways and by denominators of the whole batch.
    """

    def loss(
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        clip_low: Any = low,
        clip_high: Any = 0.2,
        aggregation: str | None = usual,
        importance_weights: torch.Tensor | None = None,
        max_length: int | None = None,
        num_tokens: int | None = None,
        num_sequences: int | None = None,
        clip_dual: Any = None,
        gradient: str = "token",
    ) -> torch.Tensor:
        if gradient != "token":
            raise NotExpressed("its ratio has the gradient of the token")
        if aggregation is None:
            raise NotExpressed("a loss of verl is one number")
        if not modes and (aggregation != usual or num_tokens or num_sequences):
            raise NotExpressed(f"it is always reduced by {usual} of the rows that it is given")
        if name == "geo_mean" and importance_weights is not None:
            if importance_weights.shape[-1] > 1:
                raise NotExpressed("a row has the geometric mean of its weights")
            importance_weights = importance_weights.expand_as(mask)
        if clip_dual is not None and not dual:
            raise NotExpressed("it has no dual clip")
        counts = {
            "batch_num_tokens": num_tokens,
            "global_batch_size": num_sequences,
            "loss_scale_factor": max_length,
        }
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=number("clip_low", clip_low),
            clip_ratio_high=number("clip_high", clip_high),
            clip_ratio_c=OFF if clip_dual is None else float(clip_dual),
            global_batch_info={name: x for name, x in counts.items() if x is not None},
        )
        weights = {} if importance_weights is None else {"rollout_is_weights": importance_weights}
        arrays = old_logprobs, logprobs, advantages, mask.to(logprobs.dtype)
        return core_algos.get_policy_loss_fn(name)(*arrays, aggregation, config, **weights)[0]

    return loss


def _sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    num_sequences: int | None = None,
) -> torch.Tensor:
    """Always a mean of means of sequences."""
    loss = _policy_loss("sapo", "seq-mean-token-mean")
    return loss(logprobs, old_logprobs, advantages, mask, num_sequences=num_sequences)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: Any = None,
    aggregation: str | None = "token-mean",
) -> torch.Tensor:
    if aggregation is None:
        raise NotExpressed("a loss of verl is one number")
    width = OFF if clip is None else number("clip", clip)
    arrays = values, returns, old_values, mask.to(values.dtype)
    return core_algos.compute_value_loss(*arrays, width, aggregation)[0]


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: str = "k3"
) -> torch.Tensor:
    return core_algos.kl_penalty(logprobs, reference_logprobs, kind)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: Any = 1.0,
    lam: Any = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its advantages are whitened: before that they are the returns less the values."""
    factors = number("gamma", gamma), number("lam", lam)
    arrays = rewards, values, mask.to(values.dtype)
    _, returns = core_algos.compute_gae_advantage_return(*arrays, *factors)
    return returns - values, returns


def _of_scores(name: str, **options: Any) -> Callable[..., torch.Tensor]:
    """An estimator of one score per response, which verl has as a reward on its last token."""

    def advantages(
        rewards: torch.Tensor,
        groups: torch.Tensor,
        lengths: torch.Tensor | None = None,
        epsilon: float = 1e-6,
        scale: str | None = "group",
    ) -> torch.Tensor:
        if scale == "batch":
            raise NotExpressed("it scales by groups")
        remaining = {"norm_adv_by_std_in_grpo": scale is not None} if name == "grpo" else options
        if lengths is not None and bool((lengths == 0).any()):
            raise NotExpressed("a response without a token has no advantage there")
        rows = torch.ones_like(rewards).long() if lengths is None else lengths.long()
        mask = (torch.arange(int(rows.max())) < rows[:, None]).to(rewards.dtype)
        scores = torch.zeros_like(mask)
        scores[torch.arange(len(rows)), (rows - 1).clamp(min=0)] = rewards
        estimator = core_algos.get_adv_estimator_fn(name)
        index = groups.numpy().astype(np.int64)
        added = {"epsilon": epsilon} if name in ("grpo", "grpo_passk") else {}
        return estimator(scores, mask, index=index, **added, **remaining)[0][:, 0]

    return advantages


def _of_groups(name: str, **options: Any) -> Callable[..., torch.Tensor]:
    outcome = _of_scores(name, **options)

    def advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return outcome(rewards, groups)

    return advantages


def opo(rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return _of_scores("opo")(rewards, groups, lengths)


def grpo(
    rewards: torch.Tensor, groups: torch.Tensor, epsilon: float = 1e-6, scale: str | None = "group"
) -> torch.Tensor:
    return _of_scores("grpo")(rewards, groups, epsilon=epsilon, scale=scale)


def _without_scale(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return grpo(rewards, groups, scale=None)


def pass_at_k(rewards: torch.Tensor, groups: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    if bool(((groups[:, None] == groups).sum(1) == 1).any()):
        raise NotExpressed("it refuses a group of one response")
    config = AlgoConfig(norm_adv_by_std_in_grpo=True)
    return _of_scores("grpo_passk", config=config)(rewards, groups, epsilon=epsilon)


def functions() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    yield "ppo_loss", "vanilla", _policy_loss("vanilla", "token-mean", dual=True)
    yield "dapo_loss", "vanilla", _policy_loss("vanilla", "token-mean", dual=True)
    yield "gspo_loss", "gspo", _policy_loss("gspo", "seq-mean-token-mean")
    yield "gmpo_loss", "geo_mean", _policy_loss("geo_mean", "seq-mean-token-mean", modes=False)
    yield "cispo_loss", "cispo", _policy_loss("cispo", "token-mean", low=None)
    yield "sapo_loss", "sapo", _sapo
    yield "value_loss", "compute_value_loss", value_loss
    yield "kl_estimate", "kl_penalty", kl_estimate
    yield "gae", "gae", gae
    yield "grpo_advantages", "grpo", grpo
    yield "dr_grpo_advantages", "grpo, no std", _without_scale
    yield "rloo_advantages", "rloo", _of_groups("rloo")
    yield "rloo_advantages", "rloo_vectorized", _of_groups("rloo_vectorized")
    yield "opo_advantages", "opo", opo
    yield "pass_at_k_advantages", "grpo_passk", pass_at_k
