"""How long a collective takes on a cluster: which links its groups use, and at what rate."""

from sharding.folding import Layout
from sharding.planner.hardware import LINK_EFFICIENCY, Hardware
from sharding.planner.transfer import Transfer, spanned


def in_domain(transfer: Transfer, layout: Layout, hardware: Hardware) -> int:
    """Members of a group in one fast domain."""
    together = 1
    for stride, size in spanned(transfer.axes, transfer.side, layout):
        together *= max(1, min(size, hardware.domain // stride))
    return together


def seconds(transfer: Transfer, layout: Layout, hardware: Hardware) -> float:
    """Of all times that it happens.

    A ring over several domains leaves each through the adapters of all its members there, so that
    its rate is the smaller of a fast link's and theirs together. An all-to-all sends to each member
    by itself, at `Hardware.exchange` of the links' rates: what goes inside and what goes outside
    travel at once. A permute is as slow as its slowest hop.
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
