"""Ring attention: keys and values visit the devices of ``cp``, forward and once more backward.

A device merges the attention outputs of its queries over one rank's keys after the other, and saves
the result and the log-sum-exp per query, as `moe.ops.attention` does on one device.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moe.attention.ring_schedule import Exchange, Pair, Ring, hops_of, pairs_of
from moe.ops.attention import (
    Flash,
    add_sinks,
    dot_do_o,
    flatten_heads,
    group_query_heads,
    heads_before_time,
    sinks_gradient,
)
from moe.ops.mask import KeySource, SegmentMask, TokenIndices, Window
from moe.ops.precision import MASK_VALUE
from moe.ops.zigzag import ZigzagLayout
from moe.remat import OPERAND, RING
from sharding.collectives import match_varying, vary
from sharding.folding import FoldedMesh

Query = Float[Array, "token heads head_dim"]
Key = Float[Array, "token kv_heads head_dim"]
Value = Float[Array, "token kv_heads v_head_dim"]
Output = Float[Array, "token heads v_head_dim"]
Sinks = Float[Array, "heads"] | None
Result = TypeVar("Result")


def ring(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    mesh: FoldedMesh,
    flash: Flash,
    scale: float | None = None,
    sinks: Sinks = None,
) -> Output:
    """Ring attention: keys and values move to another device at each of ``cp - 1`` hops; the
    softmax is online, block by block.

    No device needs the keys and values of more than two ranks at a time. In training it saves its
    local queries, keys, values, output and a float32 number per query and head, for any number of
    ranks; under the policies of `moe.remat`, which repeat no communication, the output and that
    number.

    A hop computes the half of the scores that the zig-zag order leaves (`ring_schedule.pairs_of`),
    the same amount on every device, and nothing where token indices show that nothing is visible,
    as beyond a window.

    Communication per device and layer, forward: ``2 (cp - 1)`` hops that send ``2 T K D (cp - 1) /
    cp`` elements in total, none of which waits for computation; backward as many hops that send
    twice as much: keys and values once more, and with them their gradients, in float32. A hop is a
    permute to the neighbour or, under pipeline parallelism, an exchange between two devices
    (`ring_schedule.hops_of`).

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
    query, key, value, sinks = match_varying((query, key, value, sinks), mask.indices, mask.window)
    settings = _RingSettings(mask.zigzag, mask.sources, hops_of(mesh), flash, scale)
    return _ring(query, key, value, sinks, mask.indices, mask.window, settings)


class _RingSettings(NamedTuple):
    """Static arguments of a ring: arguments of its mask, its hops, and how scores are computed."""

    zigzag: ZigzagLayout
    sources: tuple[tuple[KeySource, ...], ...]
    hops: Ring | Exchange
    flash: Flash
    scale: float

    def mask(self, indices: TokenIndices, window: Window) -> SegmentMask:
        return SegmentMask(self.zigzag, indices, self.sources, single=False, window=window)

    def split(self, x: Array) -> tuple[Array, ...]:
        """Splits keys or values of a rank by section."""
        return tuple(heads_before_time(section) for section in self.zigzag.split(x))

    def join(self, sections: list[Array]) -> Array:
        """The reverse of `split`."""
        return self.zigzag.join(*(heads_before_time(section) for section in sections))


class _Softmax(NamedTuple):
    """Attention output over a subset of the keys, float32, and the log-sum-exp of the scores."""

    out: Array
    log_sum: Array


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _ring(
    query: Array,
    key: Array,
    value: Array,
    sinks: Sinks,
    indices: TokenIndices,
    window: Window,
    settings: _RingSettings,
) -> Array:
    return _forward(query, key, value, sinks, indices, window, settings)[0]


def _forward(query, key, value, sinks, indices, window, settings):
    hops, rank = settings.hops, lax.axis_index(settings.hops.axes)
    mask = settings.mask(indices, window)
    queries = [group_query_heads(x, key.shape[1]) for x in settings.zigzag.split(query)]

    def visit(states: list[_Softmax], key: Array, value: Array, source: Array, same_rank: bool):
        """Merges the attention over a rank's keys into the result so far, `states`."""
        # A copy, so that the caller's list stays unchanged.
        keys, values, states = settings.split(key), settings.split(value), list(states)
        for pair in pairs_of(mask, rank, source, same_rank):
            key, value = (pair.source.rows(x[pair.source.section]) for x in (keys, values))
            added = _softmax(pair, queries[pair.section], key, value, settings)
            states[pair.section] = _merge(states[pair.section], added)
        return states

    empty = [_empty_softmax(x, value.shape[-1]) for x in queries]
    states = visit(empty, key, value, rank, same_rank=True)
    if hops.ranks > 1:

        def visit_and_send(carry, hop):
            states, key, value = carry
            # The next hop does not depend on this one's scores, so XLA may overlap the two.
            sent = hops.send(key, hop), hops.send(value, hop)
            return (visit(states, key, value, hops.source(rank, hop), False), *sent)

        carry = states, hops.send(key, 0), hops.send(value, 0)
        states, key_here, value_here = hops.loop(visit_and_send, carry)
        # The last keys are outside the loop: they are not sent on.
        source = hops.source(rank, hops.ranks - 1)
        states = visit(states, key_here, value_here, source, same_rank=False)
    # Sinks enter once, after all keys: in a hop, every rank's keys would add them again.
    states = [_Softmax(*add_sinks(*x, sinks)) for x in states]
    out = settings.zigzag.join(*(flatten_heads(x.out.astype(value.dtype)) for x in states))
    # Recomputing the output would repeat the hops, so every remat policy saves it.
    out = checkpoint_name(out, RING)
    log_sums = [checkpoint_name(x.log_sum, RING) for x in states]
    return out, (query, key, value, sinks, indices, window, out, log_sums)


def _backward(settings, residuals, out_gradient):
    query, key, value, sinks, indices, window, out, log_sums = residuals
    hops, rank = settings.hops, lax.axis_index(settings.hops.axes)
    mask = settings.mask(indices, window)
    queries, outs, out_gradients = (
        [group_query_heads(section, key.shape[1]) for section in settings.zigzag.split(x)]
        for x in (query, out, out_gradient)
    )
    # Row sums of output times its gradient are over all keys: computed once, not per hop.
    softmax_ds = [dot_do_o(*pair) for pair in zip(outs, out_gradients, strict=True)]

    def visit(key, value, source, same_rank: bool):
        """Gradients from the scores with the keys of a rank: of all local queries, and of these
        keys and values."""
        keys, values = settings.split(key), settings.split(value)
        grads = [[jnp.zeros(x.shape, jnp.float32) for x in xs] for xs in (queries, keys, values)]
        # Sums are float32 over sections and hops; they are rounded once, at the end.
        for pair in pairs_of(mask, rank, source, same_rank):
            section, key_section = pair.section, pair.source.section
            of_query, of_key, of_value = _gradients(
                pair,
                queries[section],
                pair.source.rows(keys[key_section]),
                pair.source.rows(values[key_section]),
                log_sums[section],
                softmax_ds[section],
                out_gradients[section],
                settings,
            )
            grads[0][section] += of_query
            grads[1][key_section] += pair.source.sums(of_key)
            grads[2][key_section] += pair.source.sums(of_value)
        return grads[0], settings.join(grads[1]), settings.join(grads[2])

    def split_key_value(both: Array) -> tuple[Array, Array]:
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    # Gradients of the local keys stay here; gradients of other ranks' keys travel with the keys,
    # and the two are added when the latter come back.
    query_gradients, *local_gradient = visit(key, value, rank, same_rank=True)
    local_gradient = jnp.concatenate(local_gradient, axis=-1)
    if hops.ranks > 1:

        def gradients_at(carry, hop):
            query_gradients, remote_gradient, keys_and_values = carry
            key, value = split_key_value(keys_and_values)
            added, *key_value_gradients = visit(key, value, hops.source(rank, hop), same_rank=False)
            added = [a + b for a, b in zip(query_gradients, added, strict=True)]
            # The gradients follow their keys one hop behind, and the last hop brings them back to
            # the rank of the keys.
            remote_gradient += jnp.concatenate(key_value_gradients, axis=-1)
            return added, hops.send(remote_gradient, hop)

        def visit_and_send(carry, hop):
            return *gradients_at(carry, hop), hops.send(carry[-1], hop)

        # Keys and values in one array. If these hops were equal to the hops of the forward pass,
        # XLA's common-subexpression elimination would merge them, and keep all ranks' keys in
        # memory.
        keys_and_values = hops.send(jnp.concatenate([key, value], axis=-1), 0)
        carry = query_gradients, jnp.zeros_like(local_gradient), keys_and_values
        carry = hops.loop(visit_and_send, carry)
        query_gradients, remote_gradient = gradients_at(carry, hops.ranks - 1)
        local_gradient += remote_gradient
    key_gradient, value_gradient = split_key_value(local_gradient)
    sinks_gradients = None
    if sinks is not None:
        sinks_gradients = sum(
            sinks_gradient(sinks, log_sum, softmax_d)
            for log_sum, softmax_d in zip(log_sums, softmax_ds, strict=True)
        )
    query_gradient = settings.zigzag.join(*(flatten_heads(x) for x in query_gradients))
    return (
        query_gradient.astype(query.dtype),
        key_gradient.astype(key.dtype),
        value_gradient.astype(value.dtype),
        sinks_gradients,
        None,
        None,
    )


_ring.defvjp(_forward, _backward)


def _softmax(
    pair: Pair, query: Array, key: Array, value: Array, settings: _RingSettings
) -> _Softmax:
    """Attention of a pair's queries over its keys, for all local queries of the section."""
    query = pair.query_chunks(query, -2)
    key, value = (pair.key_chunks(x, -2) for x in (key, value))

    def attend() -> _Softmax:
        return _Softmax(*settings.flash.attend(query, key, value, pair.mask, settings.scale))

    state = _if_visible(pair, attend, _empty_softmax(query, value.shape[-1]))
    if pair.before is None:
        return state
    # If the keys come before, the two are the early and the late chunk of queries. Else both
    # are the late chunk, over different keys, and are merged.
    (first, second), (log_sum, second_log_sum) = (jnp.split(x, 2) for x in state)
    first, second = _Softmax(first, log_sum), _Softmax(second, second_log_sum)
    # A selection by `before`, not a branch: which rank is earlier differs between devices.
    empty = _empty_softmax(first.out, first.out.shape[-1])
    late = _merge(_select(pair.before, empty, first), second)
    early = _select(pair.before, first, empty)
    return _Softmax(
        jnp.concatenate([early.out, late.out], -2),
        jnp.concatenate([early.log_sum, late.log_sum], -1),
    )


def _select(condition: Array, a: _Softmax, b: _Softmax) -> _Softmax:
    return _Softmax(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def _gradients(
    pair: Pair,
    query: Array,
    key: Array,
    value: Array,
    log_sum: Array,
    softmax_d: Array,
    out_gradient: Array,
    settings: _RingSettings,
) -> tuple[Array, Array, Array]:
    """Gradients of a pair's queries, keys and values from their scores with each other, float32."""
    query, out_gradient = (pair.query_chunks(x, -2) for x in (query, out_gradient))
    log_sum, softmax_d = (pair.query_chunks(x, -1) for x in (log_sum, softmax_d))
    key, value = (pair.key_chunks(x, -2) for x in (key, value))

    def attend_gradient() -> tuple[Array, Array, Array]:
        return settings.flash.attend_gradient(
            query, key, value, pair.mask, log_sum, softmax_d, out_gradient, settings.scale
        )

    # Both branches of the `cond` must vary over the same mesh axes.
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    of_query, *of_keys = _if_visible(pair, attend_gradient, match_varying((*zeros,), query))
    of_key, of_value = (pair.key_sums(x, -2) for x in of_keys)
    return pair.query_sums(of_query, -2), of_key, of_value


def _if_visible(pair: Pair, compute: Callable[[], Result], otherwise: Result) -> Result:
    if pair.any_visible is None:
        return compute()
    # Devices may take different branches, as neither contains a collective.
    return lax.cond(pair.any_visible, compute, lambda: otherwise)


def _empty_softmax(query: Array, width: int) -> _Softmax:
    """Attention over no keys: the neutral element of `_merge`."""
    out = match_varying(jnp.zeros((*query.shape[:-1], width), jnp.float32), query)
    return _Softmax(out, out[..., 0] + MASK_VALUE)


def _merge(a: _Softmax, b: _Softmax) -> _Softmax:
    """Attention over the keys of both."""
    # `MASK_VALUE` is finite: where neither has a visible key, the weights are 1/2 and not NaN.
    log_sum = jnp.logaddexp(a.log_sum, b.log_sum)
    of_a, of_b = (jnp.exp(x.log_sum - log_sum)[..., None] for x in (a, b))
    return _Softmax(a.out * of_a + b.out * of_b, log_sum)
