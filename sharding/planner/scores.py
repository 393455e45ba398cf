"""Memory of attention scores, where no kernel holds them on the chip.

"plain" attention materialises those of all queries and keys of a micro-batch, "blocked" those of a
row's blocks of queries, each with keys up to its own end (`moe.attention.blocked`).
"""

from sharding.folding import Layout
from sharding.planner.method import Batch, Method
from sharding.planner.models.sizes import ModelSizes

FLOAT32 = 4
BLOCK_QUERIES, MAX_SPANS = 128, 8
"""Queries of a block, and stretches of them that are compiled apart, at most."""
NUM_WORKING_ARRAYS = 3
"""Arrays of scores that a backward pass has at once: powers, their gradients and those of the
scores. XLA's CPU compiler runs the stretches of a row side by side, so that all of them are there.
"""
NUM_SAVED_ARRAYS = 2
"""Arrays that "plain" keeps of a layer where everything is kept: powers and probabilities."""


def saved_score_bytes(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> float:
    """Bytes of scores that a layer keeps for its backward pass."""
    if method.attention != "plain" or method.remat != "none":
        return 0.0
    return NUM_SAVED_ARRAYS * _micro_batch_bytes(model, layout, batch, method)


def working_score_bytes(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> float:
    """Bytes of scores in memory during attention of a layer, in its backward pass."""
    if method.attention == "plain":
        return NUM_WORKING_ARRAYS * _micro_batch_bytes(model, layout, batch, method)
    if method.attention is None:
        return 0.0
    row_bytes = FLOAT32 * model.num_heads / layout.tp * batch.time**2 / layout.cp
    blocks = -(-batch.time // BLOCK_QUERIES)
    # Queries that are not the last ones of all keys are one stretch, block by block. Two blocks are
    # what XLA's CPU programs come nearest to: fitted to them, not derived.
    if layout.cp > 1 and method.context != "ulysses":
        return NUM_WORKING_ARRAYS * row_bytes * min(2 / blocks, 1)
    return NUM_WORKING_ARRAYS * row_bytes * (1 + 1 / min(blocks, MAX_SPANS)) / 2


def _micro_batch_bytes(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> float:
    """Bytes of the scores of all rows of a device and of its heads, float32."""
    queries = batch.local_tokens(layout) * layout.tp
    keys = batch.time / (layout.cp if method.context == "ring" else 1)
    return FLOAT32 * model.num_heads / layout.tp * queries * keys
