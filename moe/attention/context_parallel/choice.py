"""Context-parallel attention over ``cp``, by one of three methods: queries of this device's tokens
attend to keys of all devices' tokens.

The methods give the same values: all-gather keys and values; pass them around a ring; or exchange
tokens for heads (Ulysses), so that each device has whole sequences and a part of the heads. The
formulas below have T tokens of all ``cp`` ranks together, H query heads and K key/value heads of
head_dim D on a ``tp`` rank. On one rank all three are core attention without communication.
"Backward as much" is the volume that the gradient sends. The reference implementation of all three
is "gather" with plain attention.
"""

from moe.attention.context_parallel.gather import gather
from moe.attention.context_parallel.ring import Key, Output, Query, Sinks, Value, ring
from moe.attention.context_parallel.ulysses import num_replicas_of, ulysses
from moe.attention.core import flash_of
from moe.config import ModelConfig
from moe.execution import Execution
from moe.ops.mask import SegmentMask, Window
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
    sinks: Sinks = None,
) -> Output:
    """Core attention for the tokens of this ``cp`` rank, by the method that `execution` names.

    Args:
      query, key, value: of this rank's tokens, for the heads of this ``tp`` rank.
      execution: its `context` is as `choose_method` takes it.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      window: number of positions that a query may look back, itself included.
      sinks: a score of each head of this ``tp`` rank that belongs to no key.

    Raises:
      ValueError: on an unknown name, and where the named method is not supported.
    """
    ranks = mesh.size(mesh.cp)
    name = _checked_method(execution, query.shape[1], key.shape[1], ranks)
    # One rank has whole sequences as they are.
    if name == "ulysses" or ranks == 1:
        return ulysses(query, key, value, mask, execution.attention, mesh, scale, window, sinks)
    if name == "gather":
        return gather(query, key, value, mask, execution.attention, mesh, scale, window, sinks)
    flash = flash_of(execution.attention, query, key, value)
    return ring(query, key, value, mask, mesh, flash, scale, window, sinks)


def context_of(config: ModelConfig, mesh: FoldedMesh) -> str:
    """Context-parallel method of a network's attention on a mesh, see `choose_method`.

    Raises:
      ValueError: on an unknown name, and where the named method is not supported.
    """
    return _checked_method(config.execution, *_heads(config, mesh), mesh.size(mesh.cp))


def prefers_contiguous(config: ModelConfig, mesh: FoldedMesh) -> bool:
    """True if a rank of ``cp`` should have contiguous parts of rows instead of zig-zag ones.

    It should with "ulysses", where every rank attends in whole sequences. With "gather" and "ring"
    a rank computes the scores of its own queries, and the parts are in zig-zag order: with
    contiguous parts the last rank would have ``2 - 1 / cp`` times an equal share of the causal
    scores.
    """
    ranks = mesh.size(mesh.cp)
    return ranks > 1 and choose_method(config.execution, *_heads(config, mesh), ranks) == "ulysses"


def choose_method(execution: Execution, heads: int, kv_heads: int, ranks: int) -> str:
    """The method that `execution.context` names. For None it is "ulysses" where the ranks divide
    the query heads and it sends less than "gather": fewer elements, and whole causal sequences for
    the kernel; otherwise "gather".

    Args:
      heads, kv_heads: of a ``tp`` rank.
      ranks: devices along ``cp``.

    Raises:
      ValueError: on an unknown name.
    """
    name = execution.context
    if name is None:
        fewer_sent = heads_sent("ulysses", heads, kv_heads, ranks) < heads_sent(
            "gather", heads, kv_heads, ranks
        )
        return "ulysses" if fewer_sent and heads % ranks == 0 else "gather"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.context={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, "
            "or None for the best that applies."
        )
    return name


def heads_sent(name: str, heads: int, kv_heads: int, ranks: int) -> float:
    """Volume that a device receives over ``cp`` in the forward pass of a layer, in heads per local
    token; a head counts as the width of a key and that of a value.

    "gather" and "ring": the keys and values of every other rank, ``K (cp - 1)``; "ulysses":
    ``(H + K c) (cp - 1) / cp``, with c copies of each (`ulysses.num_replicas_of`).
    """
    if name == "ulysses":
        return (heads + kv_heads * num_replicas_of(kv_heads, ranks)) * (ranks - 1) / ranks
    return float(kv_heads * (ranks - 1))


def received_elements(config: ModelConfig, mesh: FoldedMesh) -> int:
    """`heads_sent` in elements, for a network on a mesh."""
    ranks = mesh.size(mesh.cp)
    heads = heads_sent(context_of(config, mesh), *_heads(config, mesh), ranks)
    return round(heads * (config.head_dim + config.v_head_dim))


def _heads(config: ModelConfig, mesh: FoldedMesh) -> tuple[int, int]:
    """Query and key/value heads of a ``tp`` rank."""
    tp = mesh.size(mesh.tp)
    return config.num_heads // tp, config.num_kv_heads // tp


def _checked_method(execution: Execution, heads: int, kv_heads: int, ranks: int) -> str:
    """`choose_method`, after a check that the method is supported.

    Raises:
      ValueError: where it is not, with the fix.
    """
    name = choose_method(execution, heads, kv_heads, ranks)
    # One rank has whole sequences, and nothing to trade.
    if ranks == 1:
        return name
    if name == "ulysses" and heads % ranks:
        raise ValueError(
            f'execution.context="ulysses" splits the {heads} query heads of a tp rank over '
            f"cp={ranks}, which must divide them: choose a smaller tp or cp, or "
            'context="gather".'
        )
    if name == "ring" and execution.attention not in (None, "blocked", "mosaic"):
        raise ValueError(
            f'execution.context="ring" needs blockwise attention, not execution.attention='
            f'{execution.attention!r}: choose context="gather" or "ulysses", or '
            'attention="blocked" or "mosaic".'
        )
    return name
