"""Rematerialisation: what the backward pass of a block computes again instead of keeping it.

A block keeps

* "none": everything that a gradient needs;
* "selective": its input and the residual stream between its halves; queries, keys and values, what
  attention gives and the log-sum of each query's scores; gate and up, of experts and of dense
  layers. Of a router it keeps logits and choices, those of a kernel with their probs, and of
  collectives sums over devices. Norms, gathers of tokens, their way to the experts, permutations
  and activations are repeated, and nothing of that waits for the gradient that comes in
  (`moe.repeated`). Of T tokens of a device, of width h, with k experts of f h hidden units and
  query heads of together q h, m for a key/value head, these are ``(2 k f + 2 + 2 q + 2 q / m) T h``
  elements and a few numbers for each token beside them; of rows there is room for but that are
  nobody's, ``2 f h`` each;
* "projections": of that, neither queries nor keys nor values: the products that make them are
  repeated, with the rest. These keep most for what it takes to make them again: of a token they are
  ``(q + 2 q / m) h`` elements of ``2 h`` operations each;
* "full": its input and the results of collectives over tokens. Costs one more forward pass without
  its communication.

Weights that are kept in shards (`Execution.fsdp`) are joined again by a layer's backward pass.

In a pipeline a stage keeps this for each chunk of layers and micro-batch that is between its way
forward and its way backward (`sharding.passes`), as many as the schedule has on their way at once
(`sharding.schedule.Schedule.slots`), and each layer runs and communicates as often as without.

References:
  Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
  https://arxiv.org/abs/2205.05198
  Jin et al., "MegaScale-MoE", 2025, section 3.3 (what "selective" keeps and repeats).
  https://arxiv.org/abs/2505.11432
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jaxtyping import Array

from moe.repeated import repeating
from sharding.collectives import COLLECTIVE, SUM

PRODUCT = "product"
"""The name of gate and up, side by side."""

DISPATCHED = "dispatched"
"""The name of tokens that came from other devices to the experts of this one."""

OPERAND = "operand"
"""That of queries, keys and values as they come to the devices that attend with them."""

PROJECTED = "projected"
"""That of what products with a token make of it, on the way to queries, keys and values."""

ATTENDED = "attended"
"""That of what attention gives, and of the log-sum of each query's scores."""

RING = "ring"
"""That of both where they were made of what other devices sent."""

STREAM = "stream"
"""That of the residual stream between the two halves of a block."""

ROUTED = "routed"
"""That of a router's logits and choices, and of the probs and counts that a kernel gives with
them."""

CUDNN = "dot_product_attention_fwd_wrapper"
"""The primitive of cuDNN's attention, which gives both without a name."""

KEPT = frozenset({PRODUCT, OPERAND, ATTENDED, RING, CUDNN, STREAM, ROUTED, SUM})
"""What "selective" keeps."""

KEPT_BEFORE_NORMS = (KEPT - {OPERAND}) | {PROJECTED}
"""The same where norms or further products come after the first products: these are repeated."""

WITHOUT = {"selective": frozenset[str](), "projections": frozenset({OPERAND, PROJECTED})}
"""What policies that keep values by their names do without."""

POLICIES = ("none", *WITHOUT, "full")


def rematerialised(
    function: Callable[..., Any],
    policy: str,
    in_scan: bool = False,
    kept: Collection[str] = KEPT,
    present: Array | None = None,
) -> Callable[..., Any]:
    """`function` with the same values and gradients, keeping what the policy says.

    Args:
      function: of arrays alone; those of `WITHOUT` take no gradient of what it closes over.
      in_scan: it is the body of a scan, whose loops forward and backward keep apart by themselves
        what the compiler would otherwise have to be stopped from computing only once.
      kept: names of what "selective" keeps.
      present: for those of `WITHOUT`, whether the function runs, see `moe.repeated.repeating`.

    Raises:
      ValueError: on an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"execution.remat={policy!r} is not known: use {', '.join(POLICIES)}.")
    if policy == "none":
        return function
    if policy in WITHOUT:
        return repeating(function, frozenset(kept) - WITHOUT[policy], in_scan, present)
    # A barrier over the gradient too, which "full" is the better for: whatever is computed again
    # early is kept from then on.
    save = jax.checkpoint_policies.save_only_these_names(COLLECTIVE, SUM, RING, DISPATCHED)
    return jax.checkpoint(function, policy=save, prevent_cse=not in_scan)
