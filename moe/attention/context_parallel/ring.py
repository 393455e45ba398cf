"""Ring attention: keys and values go round the devices of ``cp``, the softmax is online."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention.context_parallel.mask import Key, Output, Query, SegmentMask, Value, visible_keys
from moe.attention.plain import scaled_scores
from moe.precision import MASK_VALUE
from sharding.collectives import own_shard, shift
from sharding.folding import FoldedMesh


def ring(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    mesh: FoldedMesh,
    scale: float | None = None,
) -> Output:
    """Keys and values go round, one device further at each of ``cp - 1`` hops; the softmax is
    online.

    Where no gradient is asked for (scoring), no device needs the keys and values of more than two
    ranks at a time. In training it keeps those of every hop for the backward pass, together as many
    as "gather" does, and so does every policy of `moe.remat`; "none" keeps the scores of every hop
    too, ``T^2 / cp`` for each query head and row of T tokens.

    Communication per device and layer, forward: ``2 (cp - 1)`` permutes that send ``2 T K D (cp -
    1) / cp`` elements together, none of which waits for what is computed; backward as much.

    References:
      Liu et al., "Ring Attention with Blockwise Transformers", 2023. https://arxiv.org/abs/2310.01889
    """
    zigzag, ranks = mask.zigzag, mesh.size(mesh.cp)
    marks = mask.column, mask.segment
    own_marks = tuple(zigzag.split(own_shard(x, mesh.cp)) for x in marks)
    queries = zigzag.split(query)
    softmaxes: list[_Softmax] | None = None
    for hop in range(ranks):
        # XLA may start the next permute while this hop is computed: nothing orders the two.
        if hop:
            key, value = shift(key, mesh.cp), shift(value, mesh.cp)
        # The marks of `mask` are whole on every device: those of the keys' rank need not travel.
        source = (jax.lax.axis_index(mesh.cp) - hop) % ranks
        their_marks = (mask.key_sections(zigzag.split(_part(x, source, ranks))) for x in marks)
        keys, values = (mask.key_sections(zigzag.split(x)) for x in (key, value))
        given = zip(queries, keys, values, visible_keys(*own_marks, *their_marks), strict=True)
        softmaxes_here = [_softmax(*each, scale) for each in given]
        softmaxes = (
            softmaxes_here
            if softmaxes is None
            else [_merge(*pair) for pair in zip(softmaxes, softmaxes_here, strict=True)]
        )
    assert softmaxes is not None
    # Divided once, at the end: the hops add numerators and denominators.
    return zigzag.join(*(_result(softmax, query.dtype) for softmax in softmaxes))


class _Softmax(NamedTuple):
    """An online softmax over some of the keys: ``out / total`` is their result, powers over ``exp
    top``.

    Arrays ``[batch, kv_head, group, time]``, `out` with the value's dimension last; float32.
    """

    top: Array
    total: Array
    out: Array


def _softmax(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    visible: Bool[Array, "batch time source"],
    scale: float | None,
) -> _Softmax:
    # Large and finite, as in `plain_attention`: what sees nothing here loses all weight in
    # `_merge`.
    scores = jnp.where(visible[:, None, None], scaled_scores(query, key, scale), MASK_VALUE)
    # The result does not depend on it, so it carries no gradient.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    powers = jnp.exp(scores - top[..., None])
    out = jnp.einsum(
        "bvgts,bsvk->bvgtk",
        powers.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    return _Softmax(top, jnp.sum(powers, axis=-1), out)


def _merge(a: _Softmax, b: _Softmax) -> _Softmax:
    """The softmax over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _Softmax(
        top,
        a.total * of_a + b.total * of_b,
        a.out * of_a[..., None] + b.out * of_b[..., None],
    )


def _result(softmax: _Softmax, dtype: jnp.dtype) -> Float[Array, "batch time heads v_head_dim"]:
    out = (softmax.out / softmax.total[..., None]).astype(dtype)
    batch, _, _, time, v_head_dim = out.shape
    return jnp.moveaxis(out, 3, 1).reshape(batch, time, -1, v_head_dim)


def _part(x: Int[Array, "token"], rank: Int[Array, ""], ranks: int) -> Int[Array, "part"]:
    """The part of an array whole on every device that belongs to a rank."""
    size = x.shape[0] // ranks
    return jax.lax.dynamic_slice_in_dim(x, rank * size, size)
