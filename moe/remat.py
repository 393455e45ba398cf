"""Rematerialisation (gradient checkpointing): activations that the backward pass of a block
recomputes instead of saving them.

By policy, a block saves

* "none": everything that a gradient needs;
* "selective": its input and the residual stream between attention and feed-forward layer; queries,
  keys and values, the attention output and the log-sum-exp of each query's scores; gate and up, of
  experts and of dense layers. It saves logits and expert ids of a router, those of a kernel with
  their gate weights, and the results of all-reduces. Norms, gathers of tokens, dispatch,
  permutations and activations are recomputed, and none of that waits for the incoming gradient
  (`moe.repeated`). For T tokens of a device, of width h, with k experts of f h hidden units and
  query heads of total width q h, m for each key/value head, these are ``(2 k f + 2 + 2 q + 2 q / m)
  T h`` elements, and in addition a few numbers for each token; and ``2 f h`` for each unused row of
  the expert buffers;
* "projections": the same without queries, keys and values: the products that compute them are
  repeated, with the rest. They take most memory for what it costs to recompute them: ``(q + 2 q /
  m) h`` elements per token, of ``2 h`` operations each;
* "full": its input and the results of collectives over tokens. Costs one more forward pass without
  its communication.

Sharded weights (`Execution.fsdp`) are gathered again by a layer's backward pass.

A pipeline stage saves this for each chunk of layers and micro-batch that is between its forward and
its backward pass (`sharding.pipeline`), as many as the schedule has in flight
(`sharding.schedule.Schedule.slots`), and each layer runs and communicates as often as without a
pipeline.

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

from moe.repeated import save_only_named
from sharding.collectives import COLLECTIVE, SUM

PRODUCT = "product"
"""The name of gate and up, side by side."""

DISPATCHED = "dispatched"
"""The name of tokens that came from other devices to the experts of this one."""

OPERAND = "operand"
"""The name of queries, keys and values on the devices that attend with them."""

PROJECTED = "projected"
"""The name of the results of products on the way to queries, keys and values."""

ATTENDED = "attended"
"""The name of the attention output, and of the log-sum-exp of each query's scores."""

RING = "ring"
"""The name of both if they were computed from what other devices sent."""

STREAM = "stream"
"""The name of the residual stream between the attention and feed-forward terms of a block."""

ROUTED = "routed"
"""The name of a router's logits and expert ids, and of the gate weights and counts that a kernel
returns with them."""

CUDNN = "dot_product_attention_fwd_wrapper"
"""The primitive of cuDNN's attention, which returns output and log-sum-exp without a name."""

SAVED = frozenset({PRODUCT, OPERAND, ATTENDED, RING, CUDNN, STREAM, ROUTED, SUM})
"""Names of the values that "selective" saves."""

SAVED_BEFORE_NORMS = (SAVED - {OPERAND}) | {PROJECTED}
"""The same if norms or further products follow the first products: these are recomputed."""

UNSAVED = {"selective": frozenset[str](), "projections": frozenset({OPERAND, PROJECTED})}
"""Names that policies which save values by name do not save."""

POLICIES = ("none", *UNSAVED, "full")


def rematerialise(
    function: Callable[..., Any],
    policy: str,
    in_scan: bool = False,
    saved: Collection[str] = SAVED,
    present: Array | None = None,
) -> Callable[..., Any]:
    """Wraps `function` in a remat policy; values and gradients stay the same.

    Args:
      function: of arrays alone; policies of `UNSAVED` have no gradient for closed-over arrays.
      in_scan: it is the body of a scan, whose separate forward and backward loops already keep the
        compiler from merging recomputation with the forward pass.
      saved: names of the values that "selective" saves.
      present: for policies of `UNSAVED`, true if the function runs, see
        `moe.repeated.save_only_named`.

    Raises:
      ValueError: on an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"execution.remat={policy!r} is not known: use {', '.join(POLICIES)}.")
    if policy == "none":
        return function
    if policy in UNSAVED:
        return save_only_named(function, frozenset(saved) - UNSAVED[policy], in_scan, present)
    # `jax.checkpoint` has a barrier over the gradient too. "full" needs it: whatever is recomputed
    # early stays in memory from then on.
    save = jax.checkpoint_policies.save_only_these_names(COLLECTIVE, SUM, RING, DISPATCHED)
    return jax.checkpoint(function, policy=save, prevent_cse=not in_scan)
