"""Ring attention: keys and values visit the devices of ``cp``, forward and once more backward.

A device merges the attention outputs of its queries over one rank's keys after the other, and saves
the result and the log-sum-exp per query, as `moe.attention.flash` does on one device.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from moe.attention.context_parallel.hops import Exchange, Ring, hops_of
from moe.attention.context_parallel.mask import (
    Key,
    Output,
    Query,
    SegmentMask,
    Sinks,
    Source,
    Value,
)
from moe.attention.context_parallel.pairs import Pair, pairs_of
from moe.attention.flash import (
    Flash,
    beside_sinks,
    by_head,
    in_groups,
    in_heads,
    sinks_gradient,
    slope_mean,
)
from moe.attention.mask import Marks, Window
from moe.precision import MASK_VALUE
from moe.remat import OPERAND, RING
from moe.tokens.zigzag import ZigzagLayout
from sharding.collectives import match_varying, vary, varying
from sharding.folding import FoldedMesh

Result = TypeVar("Result")


def ring(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    mesh: FoldedMesh,
    flash: Flash,
    scale: float | None = None,
    window: Window = None,
    sinks: Sinks = None,
) -> Output:
    """Ring attention: keys and values move to another device at each of ``cp - 1`` hops; the
    softmax is online, block by block.

    No device needs the keys and values of more than two ranks at a time. In training it saves its
    local queries, keys, values, output and a float32 number per query and head, for any number of
    ranks; under the policies of `moe.remat`, which repeat no communication, the output and that
    number.

    A hop computes the half of the scores that the zig-zag order leaves (`pairs`), the same amount
    on every device, and nothing where the marks show that nothing is visible, as beyond a window.

    Communication per device and layer, forward: ``2 (cp - 1)`` hops that send ``2 T K D (cp - 1) /
    cp`` elements in total, none of which waits for computation; backward as many hops that send
    twice as much: keys and values once more, and with them their gradients, in float32. A hop is a
    permute to the neighbour or, under pipeline parallelism, an exchange between two devices
    (`hops`).

    Args:
      flash: the implementation that computes the scores of a hop.

    References:
      Liu et al., "Ring Attention with Blockwise Transformers", 2023. https://arxiv.org/abs/2310.01889
      Brandon et al., "Striped Attention", 2023, for the imbalance of a causal ring.
      https://arxiv.org/abs/2311.09431
    """
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    # The rank, of which the masks are made, varies over cp.
    query = vary(query, mesh.cp)
    query, key, value = (checkpoint_name(x, OPERAND) for x in (query, key, value))
    query, key, value, sinks = match_varying((query, key, value, sinks), mask.marks, window)
    plan = _Plan(mask.zigzag, mask.sources, hops_of(mesh), flash, scale)
    return _ring(query, key, value, sinks, mask.marks, window, plan)


class _Plan(NamedTuple):
    """Static arguments of a ring.

    Attributes:
      zigzag, sources: of the mask.
      hops: the order in which keys and values visit the ranks.
      flash: the implementation that computes scores.
      scale: multiplies the scores.
    """

    zigzag: ZigzagLayout
    sources: tuple[tuple[Source, ...], ...]
    hops: Ring | Exchange
    flash: Flash
    scale: float

    def mask(self, marks: Marks) -> SegmentMask:
        return SegmentMask(self.zigzag, marks, self.sources, single=False)

    def split(self, x: Array) -> tuple[Array, ...]:
        """Splits keys or values of a rank by section."""
        return tuple(by_head(part) for part in self.zigzag.split(x))

    def join(self, parts: list[Array]) -> Array:
        """The reverse of `split`."""
        return self.zigzag.join(*(by_head(part) for part in parts))


class _Softmax(NamedTuple):
    """Attention output over a subset of the keys, float32, and the log-sum-exp of the scores."""

    out: Array
    log_sum: Array


class _Gradients(NamedTuple):
    """Gradients of queries, keys and values, in float32."""

    query: Array
    key: Array
    value: Array


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _ring(
    query: Array,
    key: Array,
    value: Array,
    sinks: Sinks,
    marks: Marks,
    window: Window,
    plan: _Plan,
) -> Array:
    return _forward(query, key, value, sinks, marks, window, plan)[0]


def _forward(query, key, value, sinks, marks, window, plan):
    hops, rank, mask = plan.hops, lax.axis_index(plan.hops.axes), plan.mask(marks)
    queries = [in_groups(x, key.shape[1]) for x in plan.zigzag.split(query)]

    def visit(found: list[_Softmax], key: Array, value: Array, source: Array, own: bool):
        """Merges the attention over a rank's keys into the result so far, `found`."""
        # A copy, so that the caller's list stays unchanged.
        keys, values, found = plan.split(key), plan.split(value), list(found)
        for pair in pairs_of(mask, window, rank, source, own):
            key, value = (pair.source.rows(x[pair.source.section]) for x in (keys, values))
            added = _softmax(pair, queries[pair.section], key, value, plan)
            found[pair.section] = _merged(found[pair.section], added)
        return found

    nothing = [_nothing(x, value.shape[-1]) for x in queries]
    found = visit(nothing, key, value, rank, own=True)
    if hops.ranks > 1:

        def visit_and_send(carry, hop):
            found, key, value = carry
            # The next hop does not depend on this one's scores, so XLA may overlap the two.
            following = hops.send(key, hop), hops.send(value, hop)
            return (visit(found, key, value, hops.source(rank, hop), False), *following)

        carry = found, hops.send(key, 0), hops.send(value, 0)
        found, key_here, value_here = hops.loop(visit_and_send, carry)
        # The last keys are outside the loop: they are not sent on.
        found = visit(found, key_here, value_here, hops.source(rank, hops.ranks - 1), own=False)
    # Sinks enter once, after all keys: in a hop, every rank's keys would add them again.
    found = [_Softmax(*beside_sinks(*x, sinks)) for x in found]
    out = plan.zigzag.join(*(in_heads(x.out.astype(value.dtype)) for x in found))
    # Recomputing the output would repeat the hops, so every remat policy saves it.
    out = checkpoint_name(out, RING)
    log_sums = [checkpoint_name(x.log_sum, RING) for x in found]
    return out, (query, key, value, sinks, marks, window, out, log_sums)


def _backward(plan, residuals, out_gradient):
    query, key, value, sinks, marks, window, out, log_sums = residuals
    hops, rank, mask = plan.hops, lax.axis_index(plan.hops.axes), plan.mask(marks)
    queries, outs, slopes = (
        [in_groups(part, key.shape[1]) for part in plan.zigzag.split(x)]
        for x in (query, out, out_gradient)
    )
    # Row sums of output times its gradient are over all keys: computed once, not per hop.
    means = [slope_mean(*pair) for pair in zip(outs, slopes, strict=True)]

    def visit(key, value, source, own: bool):
        """Gradients from the scores with the keys of a rank: of all local queries, and of these
        keys and values."""
        keys, values = plan.split(key), plan.split(value)
        grads = [[jnp.zeros(x.shape, jnp.float32) for x in xs] for xs in (queries, keys, values)]
        # Sums are float32 over sections and hops; they are rounded once, at the end.
        for pair in pairs_of(mask, window, rank, source, own):
            section, theirs = pair.section, pair.source.section
            found = _gradients(
                pair,
                queries[section],
                pair.source.rows(keys[theirs]),
                pair.source.rows(values[theirs]),
                log_sums[section],
                means[section],
                slopes[section],
                plan,
            )
            grads[0][section] += found.query
            grads[1][theirs] += pair.source.sums(found.key)
            grads[2][theirs] += pair.source.sums(found.value)
        return grads[0], plan.join(grads[1]), plan.join(grads[2])

    def apart(both: Array) -> tuple[Array, Array]:
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    # Gradients of the local keys stay here; those of other ranks' keys travel with the keys, and
    # the two are added when the latter come back.
    of_queries, *of_own = visit(key, value, rank, own=True)
    of_own = jnp.concatenate(of_own, axis=-1)
    if hops.ranks > 1:
        last = hops.ranks - 1

        def gradients_at(of_queries, of_theirs, theirs, hop):
            key, value = apart(theirs)
            added, *more = visit(key, value, hops.source(rank, hop), own=False)
            added = [a + b for a, b in zip(of_queries, added, strict=True)]
            # The gradients follow their keys one hop behind, and the last hop brings them back to
            # the rank of the keys.
            return added, hops.send(of_theirs + jnp.concatenate(more, axis=-1), hop)

        def visit_and_send(carry, hop):
            of_queries, of_theirs, theirs = carry
            return *gradients_at(of_queries, of_theirs, theirs, hop), hops.send(theirs, hop)

        # Keys and values in one array. If these hops were equal to those of the forward pass, XLA's
        # common-subexpression elimination would merge them, and keep all ranks' keys in memory.
        theirs = hops.send(jnp.concatenate([key, value], axis=-1), 0)
        carry = of_queries, jnp.zeros_like(of_own), theirs
        of_queries, of_theirs, theirs = hops.loop(visit_and_send, carry)
        of_queries, of_theirs = gradients_at(of_queries, of_theirs, theirs, last)
        of_own += of_theirs
    of_key, of_value = apart(of_own)
    of_sinks = None
    if sinks is not None:
        parts = zip(log_sums, means, strict=True)
        of_sinks = sum(sinks_gradient(sinks, *part) for part in parts)
    of_query = plan.zigzag.join(*(in_heads(x) for x in of_queries))
    return (
        of_query.astype(query.dtype),
        of_key.astype(key.dtype),
        of_value.astype(value.dtype),
        of_sinks,
        None,
        None,
    )


_ring.defvjp(_forward, _backward)


def _softmax(pair: Pair, query: Array, key: Array, value: Array, plan: _Plan) -> _Softmax:
    """Attention of a pair's queries over its keys, for all local queries of the section."""
    query = pair.query_pieces(query, -2)
    key, value = (pair.key_pieces(x, -2) for x in (key, value))

    def met() -> _Softmax:
        return _Softmax(*plan.flash.attend(query, key, value, pair.mask, plan.scale))

    found = _if_met(pair, met, _nothing(query, value.shape[-1]))
    if pair.before is None:
        return found
    # If the keys come before, the two pieces are the early and the late chunk of queries. Else both
    # are the late chunk, over different keys, and are merged.
    (one, other), (log_sum, other_log_sum) = (jnp.split(x, 2) for x in found)
    one, other = _Softmax(one, log_sum), _Softmax(other, other_log_sum)
    # A selection by `before`, not a branch: which rank is earlier differs between devices.
    none = _nothing(one.out, one.out.shape[-1])
    late = _merged(_chosen(pair.before, none, one), other)
    early = _chosen(pair.before, one, none)
    return _Softmax(
        jnp.concatenate([early.out, late.out], -2),
        jnp.concatenate([early.log_sum, late.log_sum], -1),
    )


def _chosen(condition: Array, a: _Softmax, b: _Softmax) -> _Softmax:
    return _Softmax(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def _gradients(
    pair: Pair,
    query: Array,
    key: Array,
    value: Array,
    log_sum: Array,
    mean: Array,
    out_gradient: Array,
    plan: _Plan,
) -> _Gradients:
    """Gradients of a pair's queries, keys and values from their scores with each other."""
    query, out_gradient = (pair.query_pieces(x, -2) for x in (query, out_gradient))
    log_sum, mean = (pair.query_pieces(x, -1) for x in (log_sum, mean))
    key, value = (pair.key_pieces(x, -2) for x in (key, value))

    def met() -> _Gradients:
        given = query, key, value, pair.mask, log_sum, mean, out_gradient
        return _Gradients(*plan.flash.attend_gradient(*given, plan.scale))

    # Both branches of the `cond` must vary over the same mesh axes.
    nothing = (jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    found = _if_met(pair, met, _Gradients(*vary(tuple(nothing), tuple(varying(query)))))
    return _Gradients(
        pair.query_sums(found.query, -2),
        pair.key_sums(found.key, -2),
        pair.key_sums(found.value, -2),
    )


def _if_met(pair: Pair, met: Callable[[], Result], nothing: Result) -> Result:
    # Devices may take different branches, as neither contains a collective.
    return met() if pair.meets is None else lax.cond(pair.meets, met, lambda: nothing)


def _nothing(query: Array, width: int) -> _Softmax:
    """Attention over no keys: the neutral element of `_merged`."""
    out = vary(jnp.zeros((*query.shape[:-1], width), jnp.float32), tuple(varying(query)))
    return _Softmax(out, out[..., 0] + MASK_VALUE)


def _merged(a: _Softmax, b: _Softmax) -> _Softmax:
    """Attention over the keys of both."""
    # `MASK_VALUE` is finite: where neither has a visible key, the weights are 1/2 and not NaN.
    log_sum = jnp.logaddexp(a.log_sum, b.log_sum)
    of_a, of_b = (jnp.exp(x.log_sum - log_sum)[..., None] for x in (a, b))
    return _Softmax(a.out * of_a + b.out * of_b, log_sum)
