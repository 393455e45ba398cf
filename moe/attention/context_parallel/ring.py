"""Ring attention: keys and values go round the devices of ``cp``, the softmax is online."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention.context_parallel.mask import Key, Query, Read, Reading, Value, visible_keys
from moe.attention.plain import scaled_scores
from moe.precision import NOTHING
from sharding.collectives import own_shard, shift
from sharding.folding import FoldedMesh


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
        given = zip(queries, keys, values, visible_keys(*own_marks, *their_marks), strict=True)
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
