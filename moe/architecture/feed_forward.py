"""Feed-forward and router options (activation, experts, capacity), and checks of which of them may
be combined.

Functions take a `moe.config.ModelConfig`, whose constructor calls the checks.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``(u + 1) g sigmoid(alpha g)`` of a gate g of at most `limit` and an up u between ``-limit``
    and `limit`.

    Args:
      alpha: gain of the sigmoid.
      limit: see above.

    References:
      OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025. https://arxiv.org/abs/2508.10925
    """

    alpha: float
    limit: float

    def __post_init__(self):
        if not self.limit > 0:
            raise ValueError(f"limit={self.limit} must be above 0: larger gates are clipped to it.")


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU


def check_first_layers(config: Any) -> None:
    """Checks the leading dense layers, and that a gate of the shared expert has one.

    Raises:
      ValueError: on leading dense layers that have no width or no experts after them, and on a gate
        if there is no shared expert.
    """
    first = config.num_dense_layers
    if first and not (
        config.num_experts and 0 < first < config.num_layers and config.dense_d_ff > 0
    ):
        raise ValueError(
            f"num_dense_layers={first} needs experts in the layers after it (num_experts="
            f"{config.num_experts}, num_layers={config.num_layers}) and a width, dense_d_ff="
            f"{config.dense_d_ff}: use 0 if all layers have the same type."
        )
    if config.shared_expert_gate and not (config.num_experts and config.d_ff):
        raise ValueError(
            f"shared_expert_gate=True needs a shared expert, not num_experts={config.num_experts} "
            f"and d_ff={config.d_ff}."
        )


def check_routing(config: Any) -> None:
    """Checks activation, router, capacity and expert groups, each and in combination.

    Raises:
      ValueError: on a value that is not valid, and on a combination that is not.
    """
    for name in ("expert_bias", "router_bias"):
        if getattr(config, name) and not config.num_experts:
            raise ValueError(f"{name}=True needs experts, not num_experts=0: leave it out.")
    if not isinstance(config.activation, ClampedSwiGLU) and config.activation not in (
        "silu",
        "gelu_tanh",
    ):
        raise ValueError(
            f'activation={config.activation!r} must be "silu", "gelu_tanh" or a ClampedSwiGLU.'
        )
    if config.softmax_after_topk and config.router_scores == "sigmoid":
        raise ValueError(
            'softmax_after_topk=True needs router_scores="softmax": sigmoid scores take no softmax.'
        )
    if config.softmax_after_topk and not config.renormalise:
        raise ValueError(
            "softmax_after_topk=True does not support renormalise=False: a softmax over the "
            "selected experts sums to 1. Leave renormalise=True."
        )
    if not config.routed_scaling > 0:
        raise ValueError(
            f"routed_scaling={config.routed_scaling} must be above 0; 1 is no scaling."
        )
    if config.capacity_factor is not None and not config.capacity_factor > 0:
        raise ValueError(
            f"capacity_factor={config.capacity_factor} must be above 0; None drops no tokens."
        )
    if config.bias_update_rate < 0:
        raise ValueError(
            f"bias_update_rate={config.bias_update_rate} must not be negative; 0 keeps the "
            "bias fixed."
        )
    _check_groups(config)


def _check_groups(config: Any) -> None:
    groups, topk = config.num_expert_groups, config.expert_groups_per_token
    if not 1 <= topk <= groups:
        raise ValueError(
            f"expert_groups_per_token={topk} must be in 1..num_expert_groups={groups}."
        )
    if groups == 1:
        return
    if config.num_experts % groups:
        raise ValueError(
            f"num_expert_groups={groups} does not divide num_experts={config.num_experts}: "
            "groups are of equal size."
        )
    if config.experts_per_token % topk:
        raise ValueError(
            f"expert_groups_per_token={topk} does not divide experts_per_token="
            f"{config.experts_per_token}: a group is ranked by its best "
            "experts_per_token / expert_groups_per_token scores."
        )
    if config.experts_per_token // topk > config.num_experts // groups:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} exceeds the experts of "
            f"expert_groups_per_token={topk} groups of "
            f"{config.num_experts // groups}: use more groups per token."
        )


def can_drop(config: Any) -> bool:
    """True if some routing can overflow an expert: ``capacity_factor k / E < 1``.

    From 1 on the capacity is enough for every token, as each selects an expert at most once.
    """
    factor = config.capacity_factor
    if not config.num_experts or factor is None:
        return False
    return round(factor * config.experts_per_token / config.num_experts, 9) < 1
