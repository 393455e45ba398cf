"""Time of collectives on a cluster, by the links of their groups and the links' rates.

It includes the collectives of a layer, and of embedding and head. A search needs the same layer
under many layouts. Results are cached by what they depend on only: attention by ``tp`` and ``cp``,
experts by ``ep`` and ``etp``.
"""

import functools
from collections.abc import Iterable
from itertools import chain

from sharding.folding import Layout
from sharding.planner import volumes
from sharding.planner.hardware import LINK_EFFICIENCY, Hardware
from sharding.planner.method import Batch, Method, for_tokens
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.models.weights import single_chunk
from sharding.planner.transfer import Transfer, group_strides

Timed = tuple[tuple[str, float], ...]
"""Names of collectives, and the seconds of each."""


def in_domain(transfer: Transfer, layout: Layout, hardware: Hardware) -> int:
    """Members of a group in one fast domain."""
    members = 1
    for stride, size in group_strides(transfer.axes, transfer.side, layout):
        members *= max(1, min(size, hardware.domain // stride))
    return members


def seconds(transfer: Transfer, layout: Layout, hardware: Hardware) -> float:
    """Seconds of a collective, over all times that it happens.

    A ring over multiple domains leaves each through the adapters of all its members there, so its
    rate is the smaller of a fast link's and the sum of theirs. An all-to-all sends to each member
    separately, at `Hardware.exchange` of the links' rates; data inside and outside of a domain is
    sent simultaneously. A permute is as slow as its slowest hop.
    """
    n, near = transfer.group(layout), in_domain(transfer, layout, hardware)
    if n == 1:
        return 0.0
    inside, outside = hardware.inside * LINK_EFFICIENCY, hardware.outside * LINK_EFFICIENCY
    if transfer.kind == "permute":
        rate, latency = (
            (inside, hardware.latency_inside) if near == n else (outside, hardware.latency_outside)
        )
        return transfer.bytes / rate + transfer.times * latency
    if transfer.kind == "all_to_all":
        to_one = transfer.bytes / n / hardware.exchange
        latency = hardware.latency_inside if near == n else hardware.latency_outside
        return max(to_one * (near - 1) / inside, to_one * (n - near) / outside) + (
            transfer.times * latency
        )
    rate = inside if near == n else min(inside, near * outside)
    hops = n - 1 if near == n else n - n // near
    latency = hops * hardware.latency_inside
    if near < n:
        latency += n // near * hardware.latency_outside
    if transfer.kind == "all_reduce":
        latency *= 2
    return transfer.sent(layout) / rate + transfer.times * latency


def layer_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> Timed:
    """Times of one layer's collectives for one micro-batch, forward and backward.

    They are those of `sharding.planner.volumes.layer`.
    """
    expert_layout = reduced_layouts(layout)[1]
    passes = []
    for rows in method.streams(batch):
        passes.append(non_expert_times(model, layout, rows, method, hardware))
        tokens = rows.local_tokens(layout)
        passes.append(_expert_times(model, expert_layout, tokens, for_tokens(method), hardware))
    return tuple(chain.from_iterable(chain(*direction) for direction in zip(*passes, strict=True)))


def non_expert_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> tuple[Timed, Timed]:
    """Times of `sharding.planner.volumes.non_expert`, forward and backward."""
    # The hops of a ring differ under a pipeline.
    cache_layout = (
        layout if method.context == "ring" and layout.pp > 1 else reduced_layouts(layout)[0]
    )
    return _non_expert_times(model, cache_layout, batch, for_tokens(method), hardware)


@functools.lru_cache(maxsize=4096)
def _non_expert_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> tuple[Timed, Timed]:
    forward, backward = volumes.non_expert(model, layout, batch, method)
    return _time_transfers(forward, layout, hardware), _time_transfers(backward, layout, hardware)


def expert_times(
    model: ModelSizes, layout: Layout, tokens: int, method: Method, hardware: Hardware
) -> tuple[Timed, Timed]:
    """Times of `sharding.planner.volumes.experts`, forward and backward."""
    return _expert_times(model, reduced_layouts(layout)[1], tokens, for_tokens(method), hardware)


@functools.lru_cache(maxsize=16384)
def _expert_times(
    model: ModelSizes, layout: Layout, tokens: int, method: Method, hardware: Hardware
) -> tuple[Timed, Timed]:
    forward, backward = volumes.experts(model, layout, tokens, method)
    return _time_transfers(forward, layout, hardware), _time_transfers(backward, layout, hardware)


def embed_and_head_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> Timed:
    """Times of embedding and head for one micro-batch, forward and backward.

    With two-batch overlap they include the collectives that restore the order of the rows.
    """
    return _embed_and_head_times(
        model, reduced_layouts(layout)[0], batch, for_tokens(method), hardware
    )


@functools.lru_cache(maxsize=4096)
def _embed_and_head_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> Timed:
    tokens = batch.local_tokens(layout)
    sent = volumes.embedding(model, layout, tokens, method)
    sent += volumes.head(model, layout, tokens, method)
    sent += volumes.row_reordering(model, layout, batch, method)
    return _time_transfers(sent, layout, hardware)


def _time_transfers(transfers: Iterable[Transfer], layout: Layout, hardware: Hardware) -> Timed:
    return tuple((one.what, seconds(one, layout, hardware)) for one in transfers)


@functools.lru_cache(maxsize=1024)
def reduced_layouts(layout: Layout) -> tuple[Layout, Layout]:
    """Reduced layouts with ``tp cp`` and with ``ep etp`` only, as keys of the caches.

    Where the groups over these axes span other ranks than in the full layout, it is the full one.
    """
    full = single_chunk(layout)
    attention = Layout(tp=layout.tp, cp=layout.cp)
    experts = Layout(dp=layout.ep * layout.etp, ep=layout.ep, etp=layout.etp)
    return (
        attention if _span_same_groups(("tp",), ("cp",), attention, full) else full,
        experts if _span_same_groups(("etp",), ("ep",), experts, full) else full,
    )


def _span_same_groups(
    inner: tuple[str, ...], outer: tuple[str, ...], reduced: Layout, full: Layout
) -> bool:
    groups = inner, outer, (*outer, *inner)
    return all(
        group_strides(axes, None, reduced) == group_strides(axes, None, full) for axes in groups
    )
