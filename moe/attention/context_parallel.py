"""Context-parallel attention over ``cp``, by one of three methods: queries of this device's tokens
attend to keys of all devices' tokens.

The methods give the same values: all-gather keys and values; pass them around a ring; or exchange
tokens for heads (Ulysses), so that each device has whole sequences and a part of the heads. The
formulas below have T tokens of all ``cp`` ranks together, H query heads and K key/value heads of
head_dim D on a ``tp`` rank. On one rank all three are core attention without communication.
"Backward as much" is the volume that the gradient sends. The reference implementation of all three
is "gather" with plain attention.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Shaped

from moe.attention.core import core_attention, flash_of
from moe.attention.ring import Key, Output, Query, Sinks, Value, ring
from moe.config import Model
from moe.execution import Execution
from moe.kernels.choice import devices_of
from moe.ops.mask import Mask, SegmentMask, TokenIndices
from moe.remat import OPERAND
from sharding.collectives import Axes, gather_tokens, local_shard, match_varying, swap_shards
from sharding.folding import FoldedMesh

Attend = Callable[..., Array]
"""`core_attention`, all but its operands."""

IMPLEMENTATIONS = ("gather", "ring", "ulysses")
CRASHING_JAX = "0.11."
"""Versions of JAX whose partitioner (Shardy) ends the process with a segmentation fault when it
imports the gradient of a ring in the stages of a pipeline. Those before and after compile it."""


def context_parallel_attention(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    execution: Execution,
    mesh: FoldedMesh,
    scale: float | None = None,
    sinks: Sinks = None,
) -> Output:
    """Core attention for the tokens of this ``cp`` rank, by the method that `execution` names.

    Args:
      query, key, value: heads of this rank's tokens, for the heads of this ``tp`` rank.
      execution: its `context` is as `choose_method` takes it.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: a score of each head of this ``tp`` rank that belongs to no key.

    Raises:
      ValueError: on an unknown name, and where the named method is not supported.
    """
    ranks = mesh.size(mesh.cp)
    name = _checked_method(execution, query.shape[1], key.shape[1], mesh)
    devices = devices_of(mesh)
    attend = partial(
        core_attention, scale=scale, implementation=execution.attention, devices=devices
    )
    # One rank has whole sequences as they are.
    if name == "ulysses" or ranks == 1:
        return ulysses(query, key, value, mask, attend, mesh, sinks)
    if name == "gather":
        return gather(query, key, value, mask, attend, mesh, sinks)
    flash = flash_of(execution.attention, query, key, value, devices)
    return ring(query, key, value, mask, mesh, flash, scale, sinks)


def context_of(model: Model) -> str:
    """Context-parallel method of a network's attention on a mesh, see `choose_method`.

    Raises:
      ValueError: on an unknown name, and where the named method is not supported.
    """
    return _checked_method(model.config.execution, *_heads(model), model.mesh)


def prefers_contiguous(model: Model) -> bool:
    """True if a rank of ``cp`` should have contiguous parts of rows instead of zig-zag ones.

    It should with "ulysses", where every rank attends in whole sequences (`moe.ops.zigzag`). With
    "gather" and "ring" the last rank would have ``2 - 1 / cp`` times an equal share of the causal
    scores.
    """
    ranks = model.mesh.size(model.mesh.cp)
    return ranks > 1 and choose_method(model.config.execution, *_heads(model), ranks) == "ulysses"


def choose_method(execution: Execution, heads: int, kv_heads: int, ranks: int) -> str:
    """The method that `execution.context` names. For None it is "ulysses" where the ranks divide
    the query heads and it sends less than "gather": fewer elements, and whole causal sequences for
    the kernel; otherwise "gather".

    Args:
      heads, kv_heads: number of heads of a ``tp`` rank.
      ranks: devices along ``cp``.

    Raises:
      ValueError: on an unknown name.
    """
    name = execution.context
    if name is None:
        sent = {each: heads_sent(each, heads, kv_heads, ranks) for each in ("ulysses", "gather")}
        fewer_sent = sent["ulysses"] < sent["gather"]
        return "ulysses" if fewer_sent and heads % ranks == 0 else "gather"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.context={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, "
            "or None for the best that applies."
        )
    return name


def heads_sent(name: str, heads: int, kv_heads: int, ranks: int) -> float:
    """Volume that a device receives over ``cp`` in the forward pass of a layer, in heads per local
    token; a head counts as the width of a key and a value.

    "gather" and "ring": the keys and values of every other rank, ``K (cp - 1)``; "ulysses":
    ``(H + K c) (cp - 1) / cp``, with c copies of each (`num_replicas_of`).
    """
    if name == "ulysses":
        return (heads + kv_heads * num_replicas_of(kv_heads, ranks)) * (ranks - 1) / ranks
    return float(kv_heads * (ranks - 1))


def received_elements(model: Model) -> int:
    """`heads_sent` in elements, for a network on a mesh."""
    ranks = model.mesh.size(model.mesh.cp)
    heads = heads_sent(context_of(model), *_heads(model), ranks)
    return round(heads * (model.config.head_dim + model.config.v_head_dim))


def _heads(model: Model) -> tuple[int, int]:
    """Query and key/value heads of a ``tp`` rank."""
    tp = model.mesh.size(model.mesh.tp)
    return model.config.num_heads // tp, model.config.num_kv_heads // tp


def _checked_method(execution: Execution, heads: int, kv_heads: int, mesh: FoldedMesh) -> str:
    """`choose_method`, after a check that the method is supported.

    Raises:
      ValueError: if it is not, with the fix.
    """
    ranks = mesh.size(mesh.cp)
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
    if name == "ring" and mesh.layout.pp > 1 and jax.__version__.startswith(CRASHING_JAX):
        raise ValueError(
            f'execution.context="ring" under a pipeline (pp={mesh.layout.pp}) crashes the compiler '
            f'of JAX {jax.__version__}: install another version, or choose context="gather" or '
            '"ulysses".'
        )
    return name


def gather(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    attend: Attend,
    mesh: FoldedMesh,
    sinks: Sinks = None,
) -> Output:
    """All-gathers keys and values to every device, which computes attention of its own queries.

    Communication per device and layer, forward: two all-gathers that receive ``2 T K D (cp - 1) /
    cp`` elements in total; backward as much, by reduce-scatter.

    References:
      Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2. https://arxiv.org/abs/2407.21783
    """
    zigzag = mask.zigzag
    query, key, value = (checkpoint_name(x, OPERAND) for x in (query, key, value))
    # Ranks hold zig-zag chunks: `restore` reorders the gathered keys by column.
    keys, values = (
        mask.key_sections(zigzag.restore(gather_tokens(x, mesh.cp))) for x in (key, value)
    )
    query_indices = mask.indices_by_section(
        TokenIndices(*(local_shard(x, mesh.cp) for x in mask.indices))
    )
    masks = (
        Mask(*indices, mask.window, single=mask.single)
        for indices in zip(query_indices, mask.key_indices(mask.full_indices()), strict=True)
    )
    sections = zip(zigzag.split(query), keys, values, masks, strict=True)
    return zigzag.join(*(attend(*each, sinks=sinks) for each in sections))


def ulysses(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    attend: Attend,
    mesh: FoldedMesh,
    sinks: Sinks = None,
) -> Output:
    """Exchanges tokens for heads and back: each device has whole sequences, for its part of the
    query heads, which ``cp`` must divide.

    Where ``cp`` does not divide the key/value heads, each of them is repeated the least number of
    times that helps (`num_replicas_of`); the gradients of its copies are summed in float32.

    Communication per device and layer, forward: one all-to-all of queries, keys and values in one
    array, ``T (H + 2 K c) D (cp - 1) / cp^2`` elements sent, and one back of ``T H D (cp - 1) /
    cp^2``; backward as much, with c copies of each key/value head. With ``c = 1`` and m = H / K
    that is ``T H D (2 + 2 / m) (cp - 1) / cp^2``: the volume of tensor parallelism, ``2 T H D (cp -
    1) / cp``, times ``(1 + 1 / m) / cp``. MegaScale-MoE prints twice that as equation (2).

    References:
      Jacobs et al., "DeepSpeed Ulysses", 2023. https://arxiv.org/abs/2309.14509
      Jin et al., "MegaScale-MoE", 2025, section 3.1 (whole attention weights on every device, and
      the same devices for the experts). https://arxiv.org/abs/2505.11432
    """
    ranks = mesh.size(mesh.cp)
    replicas = num_replicas_of(key.shape[1], ranks)
    key, value = (_repeat_heads(x, replicas) for x in (key, value))
    zigzag = mask.zigzag
    exchanged = _gather_sequences(match_varying((query, key, value)), mesh.cp, ranks)
    queries, keys, values = (zigzag.restore(checkpoint_name(x, OPERAND)) for x in exchanged)
    sinks = None if sinks is None else local_shard(sinks, mesh.cp)
    query_indices = mask.full_indices()
    # Rows are whole and in order, and a section's own keys come last: the masks are causal, and a
    # kernel can skip the hidden half.
    masks = (
        Mask(*indices, mask.window, causal=True, single=mask.single)
        for indices in zip(query_indices, mask.key_indices(query_indices), strict=True)
    )
    sections = zip(queries, mask.key_sections(keys), mask.key_sections(values), masks, strict=True)
    out = zigzag.flatten(*(attend(*each, sinks=sinks) for each in sections))
    return swap_shards(out, mesh.cp, split=0, join=1)


def num_replicas_of(kv_heads: int, ranks: int) -> int:
    """Copies of each key/value head: the least number for which `ranks` divides all copies."""
    return ranks // math.gcd(kv_heads, ranks)


def _repeat_heads(x: Shaped[Array, "token heads width"], replicas: int) -> Array:
    if replicas == 1:
        return x
    # Cast to float32 for the gradient alone: the sum over bfloat16 copies is then in float32 and
    # rounded once.
    return jnp.repeat(x.astype(jnp.float32), replicas, axis=1).astype(x.dtype)


def _gather_sequences(
    arrays: tuple[Array, ...], axes: Axes, ranks: int
) -> tuple[Shaped[Array, "all_tokens _heads _width"], ...]:
    """All-to-all of arrays ``[token, heads, width]``: from this rank's tokens and all heads to all
    tokens and this rank's part of the heads."""
    if ranks == 1:
        return arrays
    # One array, with the parts for each receiving rank side by side: one collective for all three,
    # whatever their heads and widths.
    rows = [x.reshape(x.shape[0], ranks, -1) for x in arrays]
    ends = list(accumulate(x.shape[2] for x in rows))[:-1]
    exchanged = swap_shards(jnp.concatenate(rows, axis=2), axes, split=1, join=0)
    split = jnp.split(exchanged[:, 0], ends, axis=1)
    return tuple(
        received.reshape(received.shape[0], -1, x.shape[2])
        for received, x in zip(split, arrays, strict=True)
    )
