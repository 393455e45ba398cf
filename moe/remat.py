"""Rematerialisation: what the backward pass of a block computes again instead of keeping it.

Results of collectives over tokens are kept, so that none of them is repeated, with two exceptions:
weights that are kept in shards (`Execution.fsdp`) are joined again by a layer's backward pass, and
"selective" sends tokens to the experts again. Beside the results a block keeps

* "none": everything that a gradient needs;
* "selective": its input and the results of products with weights, not attention's scores and
  softmax, norms, activations, permuted rows, nor tokens that came from other devices to the experts
  of this one: where experts are many these are more than all else together. Costs little time and
  half of the experts' forward communication;
* "full": its input. Costs one more forward pass without its communication.

In a pipeline a stage keeps this for each chunk of layers and micro-batch that is between its way
forward and its way backward (`sharding.passes`), as many as the schedule has on their way at once
(`sharding.schedule.Schedule.slots`), and each layer runs and communicates as often as without.

References:
  Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
  https://arxiv.org/abs/2205.05198
  Jin et al., "MegaScale-MoE", 2025 (tokens are gathered again).
  https://arxiv.org/abs/2505.11432
"""

from collections.abc import Callable
from typing import Any

import jax

from sharding.collectives import COLLECTIVE

PRODUCT = "product"
"""The name of the experts' matrix products, which policies know by no other mark."""

DISPATCHED = "dispatched"
"""The name of tokens that came from other devices to the experts of this one."""

_policies = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "selective": _policies.save_from_both_policies(
        # Products with a batch dimension are those of attention's scores.
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names(COLLECTIVE, PRODUCT),
    ),
    "full": _policies.save_only_these_names(COLLECTIVE, DISPATCHED),
}


def rematerialised(
    function: Callable[..., Any], policy: str, in_scan: bool = False
) -> Callable[..., Any]:
    """`function` with the same values and gradients, keeping what the policy says.

    Args:
      in_scan: it is the body of a scan, whose loops forward and backward keep apart by themselves
        what the compiler would otherwise have to be stopped from computing only once.

    Raises:
      ValueError: on an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"execution.remat={policy!r} is not known: use {', '.join(POLICIES)}.")
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=not in_scan)
