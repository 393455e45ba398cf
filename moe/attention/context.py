"""Attention across ``cp``: queries of this device's tokens read keys of all devices' tokens.

Three ways, with the same values: gather all keys and values; pass them around a ring; or trade
tokens for heads (Ulysses), so that each device has whole sequences and some of the heads. Written
below with T tokens of all ``cp`` ranks together, H query heads and K key/value heads of head_dim D
on a ``tp`` rank. On one rank all three are reading, and communicate nothing. "Backward as much" is
what the gradient sends; a pipeline also goes forward twice (`moe.remat`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention.core import read
from moe.attention.layer import NOTHING, scaled_scores
from moe.execution import Execution
from moe.tokens.zigzag import Order
from sharding.collectives import gather_tokens, own_shard, shift, swap_shards
from sharding.folding import FoldedMesh

Query = Float[Array, "token heads head_dim"]
Key = Float[Array, "token kv_heads head_dim"]
Value = Float[Array, "token kv_heads value_dim"]
Read = Float[Array, "token heads value_dim"]
Sections = tuple[Array, ...]
IMPLEMENTATIONS = ("gather", "ring", "ulysses")


class Reading(NamedTuple):
    """Who may read whom in a stream: earlier or equal columns of the own segment.

    Attributes:
      order: of the stream.
      column: ``[token]`` place in the row.
      segment: ``[token]`` id of the sequence within the row; 0 for padding, which nobody reads.
      sources: from something per token, by section, to what the queries of each section read of it.
    """

    order: Order
    column: Array
    segment: Array
    sources: Callable[[Sections], Sections]


def attend_across(
    query: Query,
    key: Key,
    value: Value,
    reading: Reading,
    execution: Execution,
    mesh: FoldedMesh,
    scale: float | None = None,
) -> Read:
    """What the tokens of this ``cp`` rank read, by the implementation that `execution` names.

    Args:
      query, key, value: of this rank's tokens, for the heads of this ``tp`` rank.
      execution: `context` None is "ulysses" where it can serve and sends less than "gather", which
        is else the choice: fewer elements, and whole causal sequences for the kernel.
      scale: multiplies the scores; None is ``head_dim**-0.5``.

    Raises:
      ValueError: on an unknown name and where the one demanded cannot serve.
    """
    ranks, name = mesh.size(mesh.cp), execution.context
    if name is None:
        fewer = query.shape[1] + key.shape[1] < ranks * key.shape[1]
        name = "ulysses" if fewer and key.shape[1] % ranks == 0 else "gather"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.context={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, "
            "or None for the best that applies."
        )
    # One rank has whole sequences as they are.
    if name == "ulysses" or ranks == 1:
        return ulysses(query, key, value, reading, execution.attention, mesh, scale)
    if name == "gather":
        return gather(query, key, value, reading, execution.attention, mesh, scale)
    if execution.attention not in (None, "plain"):
        raise ValueError(
            f'execution.context="ring" has its own softmax and cannot use execution.attention='
            f'{execution.attention!r}: choose context="gather" or "ulysses", or attention="plain".'
        )
    return ring(query, key, value, reading, mesh, scale)


def gather(
    query: Query,
    key: Key,
    value: Value,
    reading: Reading,
    attention: str | None,
    mesh: FoldedMesh,
    scale: float | None = None,
) -> Read:
    """All keys and values on every device, read by the queries of its own tokens.

    Communication per device and layer, forward: two all-gathers that receive ``2 T K D (cp - 1) /
    cp`` elements together; backward as much, by reduce-scatter.

    References:
      Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2. https://arxiv.org/abs/2407.21783
    """
    order = reading.order
    keys, values = (reading.sources(order.restore(gather_tokens(x, mesh.cp))) for x in (key, value))
    visible = _visible(
        *(order.split(own_shard(x, mesh.cp)) for x in (reading.column, reading.segment)),
        *(reading.sources(order.restore(x)) for x in (reading.column, reading.segment)),
    )
    return order.join(
        *(
            read(*given, scale=scale, implementation=attention)
            for given in zip(order.split(query), keys, values, visible, strict=True)
        )
    )


def ulysses(
    query: Query,
    key: Key,
    value: Value,
    reading: Reading,
    attention: str | None,
    mesh: FoldedMesh,
    scale: float | None = None,
) -> Read:
    """Heads for tokens and back: each device reads whole sequences, for its part of the heads.

    Communication per device and layer, forward: four all-to-alls that send ``2 T (H + K) D (cp - 1)
    / cp^2`` elements together; backward as much.

    Raises:
      ValueError: when the key/value heads of a ``tp`` rank do not divide by ``cp``.

    References:
      Jacobs et al., "DeepSpeed Ulysses", 2023. https://arxiv.org/abs/2309.14509
    """
    ranks = mesh.size(mesh.cp)
    if key.shape[1] % ranks:
        raise ValueError(
            f'execution.context="ulysses" splits the {key.shape[1]} key/value heads of a tp rank '
            f"over cp={ranks}, which must divide them: choose a smaller tp or cp, or "
            'context="gather".'
        )
    order = reading.order
    queries, keys, values = (
        order.restore(swap_shards(x, mesh.cp, split=1, join=0)) for x in (query, key, value)
    )
    column, segment = (order.restore(x) for x in (reading.column, reading.segment))
    visible = _visible(column, segment, reading.sources(column), reading.sources(segment))
    # A section reads either itself, place by place, or more than itself.
    causal = [seen.shape[1] == seen.shape[2] for seen in visible]
    given = zip(
        queries, reading.sources(keys), reading.sources(values), visible, causal, strict=True
    )
    out = order.flatten(*(read(*each, scale, attention) for each in given))
    return swap_shards(out, mesh.cp, split=0, join=1)


def ring(
    query: Query,
    key: Key,
    value: Value,
    reading: Reading,
    mesh: FoldedMesh,
    scale: float | None = None,
) -> Read:
    """Keys and values go round, one device further at each of ``cp - 1`` hops; the softmax is
    online.

    Where no gradient is asked for (scoring), no device needs the keys and values of more than two
    ranks at a time. In training it keeps those of every hop for the backward pass, together as many
    as "gather" does, and so does every policy of `moe.remat`; "none" keeps the scores of every hop
    too, ``T^2 / cp`` for each query head and row of T tokens.

    Communication per device and layer, forward: ``2 (cp - 1)`` permutes that send ``2 T K D (cp -
    1) / cp`` elements together, none of which waits for what is read; backward as much.

    References:
      Liu et al., "Ring Attention with Blockwise Transformers", 2023. https://arxiv.org/abs/2310.01889
    """
    order, ranks = reading.order, mesh.size(mesh.cp)
    marks = reading.column, reading.segment
    own_marks = tuple(order.split(own_shard(x, mesh.cp)) for x in marks)
    queries = order.split(query)
    softmaxes: list[_Softmax] | None = None
    for hop in range(ranks):
        if hop:
            key, value = shift(key, mesh.cp), shift(value, mesh.cp)
        # Marks are whole on every device: those of the keys' rank need not travel.
        source = (jax.lax.axis_index(mesh.cp) - hop) % ranks
        their_marks = (reading.sources(order.split(_part(x, source, ranks))) for x in marks)
        keys, values = (reading.sources(order.split(x)) for x in (key, value))
        given = zip(queries, keys, values, _visible(*own_marks, *their_marks), strict=True)
        softmaxes_here = [_softmax(*each, scale) for each in given]
        softmaxes = (
            softmaxes_here
            if softmaxes is None
            else [_merge(*pair) for pair in zip(softmaxes, softmaxes_here, strict=True)]
        )
    assert softmaxes is not None
    return order.join(*(_result(softmax, query.dtype) for softmax in softmaxes))


class _Softmax(NamedTuple):
    """A softmax over some of the keys: ``read / total`` is what is read, its powers over ``exp
    top``.

    Arrays ``[batch, kv_head, group, time]``, `read` with the value's dimension last; float32.
    """

    top: Array
    total: Array
    read: Array


def _softmax(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    visible: Bool[Array, "batch time source"],
    scale: float | None,
) -> _Softmax:
    # Large and finite, as in `read_values`: what sees nothing here loses all weight in the merge.
    scores = jnp.where(visible[:, None, None], scaled_scores(query, key, scale), NOTHING)
    # The result does not depend on it, so it carries no gradient.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    powers = jnp.exp(scores - top[..., None])
    read = jnp.einsum(
        "bvgts,bsvk->bvgtk",
        powers.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    return _Softmax(top, jnp.sum(powers, axis=-1), read)


def _merge(a: _Softmax, b: _Softmax) -> _Softmax:
    """The softmax over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _Softmax(
        top,
        a.total * of_a + b.total * of_b,
        a.read * of_a[..., None] + b.read * of_b[..., None],
    )


def _result(softmax: _Softmax, dtype: jnp.dtype) -> Float[Array, "batch time heads value_dim"]:
    read = (softmax.read / softmax.total[..., None]).astype(dtype)
    batch, _, _, time, value_dim = read.shape
    return jnp.moveaxis(read, 3, 1).reshape(batch, time, -1, value_dim)


def _part(x: Int[Array, "token"], rank: Int[Array, ""], ranks: int) -> Int[Array, "part"]:
    """The part of an array whole on every device that belongs to a rank."""
    size = x.shape[0] // ranks
    return jax.lax.dynamic_slice_in_dim(x, rank * size, size)


def _visible(
    column: Sections, segment: Sections, source_column: Sections, source_segment: Sections
) -> Sections:
    """Per section ``[row, time, source]``: which keys each query may read."""
    return tuple(
        (q_column[:, :, None] >= k_column[:, None, :])
        & (q_segment[:, :, None] == k_segment[:, None, :])
        & (k_segment > 0)[:, None, :]
        for q_column, q_segment, k_column, k_segment in zip(
            column, segment, source_column, source_segment, strict=True
        )
    )
