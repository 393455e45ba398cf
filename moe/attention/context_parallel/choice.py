"""Attention across ``cp``: queries of this device's tokens attend to keys of all devices' tokens.

Three ways, with the same values: gather all keys and values; pass them around a ring; or trade
tokens for heads (Ulysses), so that each device has whole sequences and some of the heads. Written
below with T tokens of all ``cp`` ranks together, H query heads and K key/value heads of head_dim D
on a ``tp`` rank. On one rank all three are core attention, and communicate nothing. "Backward as
much" is what the gradient sends. The plain twin of all three is "gather" with plain attention.
"""

from moe.attention.context_parallel.gather import gather
from moe.attention.context_parallel.mask import Key, Output, Query, SegmentMask, Value
from moe.attention.context_parallel.ring import ring
from moe.attention.context_parallel.ulysses import ulysses
from moe.attention.mask import Window
from moe.execution import Execution
from sharding.folding import FoldedMesh

IMPLEMENTATIONS = ("gather", "ring", "ulysses")


def context_parallel_attention(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    execution: Execution,
    mesh: FoldedMesh,
    scale: float | None = None,
    window: Window = None,
) -> Output:
    """Core attention for the tokens of this ``cp`` rank, by the way that `execution` names.

    Args:
      query, key, value: of this rank's tokens, for the heads of this ``tp`` rank.
      execution: `context` None is "ulysses" where it can serve and sends less than "gather", which
        is else the choice: fewer elements, and whole causal sequences for the kernel.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      window: how many positions a query may look back, itself included.

    Raises:
      ValueError: on an unknown name and where the one demanded cannot serve.
    """
    ranks, name = mesh.size(mesh.cp), execution.context
    if name is None:
        # Per token: Ulysses sends all heads once, gather receives every other rank's keys and
        # values.
        fewer = query.shape[1] + key.shape[1] < ranks * key.shape[1]
        name = "ulysses" if fewer and key.shape[1] % ranks == 0 else "gather"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.context={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, "
            "or None for the best that applies."
        )
    # One rank has whole sequences as they are.
    if name == "ulysses" or ranks == 1:
        return ulysses(query, key, value, mask, execution.attention, mesh, scale, window)
    if name == "gather":
        return gather(query, key, value, mask, execution.attention, mesh, scale, window)
    if execution.attention not in (None, "blocked"):
        raise ValueError(
            f'execution.context="ring" works in blocks and cannot use execution.attention='
            f'{execution.attention!r}: choose context="gather" or "ulysses", or '
            'attention="blocked".'
        )
    return ring(query, key, value, mask, mesh, scale, window)
