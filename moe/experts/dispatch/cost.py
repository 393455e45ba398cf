"""Cost model of token dispatchers: predicted time of their collectives, and the cheapest one.

Bytes come from `sharding.costs.transfer`, links from `sharding.costs.hardware`. Sent bytes are
counted: of balanced routing for "ragged", of full buffers for the others. The time is for many
tokens, for which latencies are negligible, so that the result depends on the network, its mesh and
its devices and not on a batch: training, scoring and sampling choose the same dispatcher.
"""

import math
from dataclasses import dataclass, replace

import jax

from sharding.costs.hardware import HARDWARE, UNKNOWN, Hardware, find_hardware
from sharding.costs.transfer import TokenDispatch
from sharding.folding import FoldedMesh, Layout

MANY_TOKENS = 2**20
"""Tokens of a device, so many that fixed costs and rounding are negligible."""
NAMES = ("all_gather", "all_to_all", "ragged")
"""The first of equals is taken: "all_gather" needs no permutation."""


@dataclass(frozen=True)
class TokenExchange:
    """Token exchange of a layer: the sizes that its time depends on.

    Attributes:
      num_experts: number of experts on all devices.
      k: experts per token.
      d_model: elements of a token.
      itemsize: bytes of an element.
      peer_capacity: fraction of a device's tokens that its buffers let it send to one peer: 1 for
        any routing, less with a capacity or a buffer factor.
      rate: rate of an all-to-all relative to a ring's, as `benchmarks/dispatch.py` measures it;
        None is `Hardware.exchange`.
      comm_dtype: as in `moe.experts.dispatch.choice.dispatch`.
    """

    num_experts: int
    k: int
    d_model: int
    itemsize: int
    peer_capacity: float = 1.0
    rate: float | None = None
    comm_dtype: str | None = None


def peer_capacity_of(
    k: int, ep: int, capacity_factor: float | None, buffer_factor: float | None
) -> float:
    """`TokenExchange.peer_capacity`: the limit of `moe.experts.dispatch.buffers.peer_tokens` per
    token for many tokens."""
    factors = [factor for factor in (capacity_factor, buffer_factor) if factor is not None]
    return min([1.0, *(factor * k / ep for factor in factors)])


def predict_seconds(
    exchange: TokenExchange, layout: Layout, hardware: Hardware
) -> dict[str, float]:
    """Seconds for `MANY_TOKENS` tokens of each device, forward and backward, by dispatcher."""
    rate = hardware.exchange if exchange.rate is None else exchange.rate
    without_latency = replace(hardware, latency_inside=0.0, latency_outside=0.0, exchange=rate)
    times = {}
    buffers = math.ceil(exchange.peer_capacity * MANY_TOKENS)
    for name in NAMES:
        per_peer = buffers
        if name == "ragged":
            per_peer = min(buffers, math.ceil(fraction_with_expert(exchange, layout) * MANY_TOKENS))
        sizes = MANY_TOKENS, per_peer, exchange.k, exchange.d_model, exchange.itemsize
        forward, backward = TokenDispatch(
            name, layout, *sizes, layout.ep * buffers, exchange.comm_dtype
        ).transfers()
        times[name] = math.fsum(
            collective.seconds(layout, without_latency) for collective in [*forward, *backward]
        )
    return times


def fraction_with_expert(exchange: TokenExchange, layout: Layout) -> float:
    """Fraction of tokens with an expert on a given device, if all sets of k experts are equally
    likely: ``1 - C(E - L, k) / C(E, k)``."""
    local = exchange.num_experts // layout.ep
    absent = math.comb(exchange.num_experts - local, exchange.k)
    return 1 - absent / math.comb(exchange.num_experts, exchange.k)


def supported_dispatchers(mesh: FoldedMesh) -> tuple[str, ...]:
    """Dispatchers that the devices of a mesh support."""
    if mesh.platform in ("gpu", "tpu") and mesh.size(mesh.ep) > 1:
        return NAMES
    return NAMES[:2]


def candidates(mesh: FoldedMesh) -> tuple[str, ...]:
    """Dispatchers that may be the default on a mesh.

    On GPUs "ragged" is used by name only, until two of them have run it: see
    `moe.execution.Execution.overlaps`.
    """
    return NAMES[:2] if mesh.platform == "gpu" else supported_dispatchers(mesh)


def hardware_of(mesh: FoldedMesh) -> Hardware:
    """Hardware model of a mesh's devices and their links; `UNKNOWN` for devices that are not
    listed."""
    if mesh.platform == "cpu":
        return HARDWARE["laptop"]
    if not isinstance(mesh.mesh, jax.sharding.Mesh):
        return UNKNOWN
    hardware = find_hardware(mesh.mesh.devices.flat[0].device_kind)
    return UNKNOWN if hardware is None else hardware


def cheapest(exchange: TokenExchange, mesh: FoldedMesh) -> str:
    """Dispatcher with the least predicted time on a mesh.

    References:
      Jin et al., "MegaScale-MoE", 2025, section 3.2 (large k gathers, measured from 6 on where
      bytes say 8). https://arxiv.org/abs/2505.11432
    """
    times = predict_seconds(exchange, mesh.layout, hardware_of(mesh))
    # Equal volumes must not be distinguished by the rounding of a sum.
    least = min(times[name] for name in candidates(mesh)) * (1 + 1e-6)
    return next(name for name in candidates(mesh) if times[name] <= least)


def explain_choice(exchange: TokenExchange, mesh: FoldedMesh) -> str:
    """Result of `cheapest` with its reason, in a line."""
    hardware, name = hardware_of(mesh), cheapest(exchange, mesh)
    times = predict_seconds(exchange, mesh.layout, hardware)
    others = [
        f"{other} takes {times[other] / times[name]:.2f} times as long"
        for other in candidates(mesh)
        if other != name
    ]
    rate = hardware.exchange if exchange.rate is None else exchange.rate
    by = "from bytes sent" if hardware is UNKNOWN else f"for the links of {hardware.name}"
    slower = "" if rate == 1.0 else f"; an all-to-all at {rate:.2g} of a ring's rate"
    return f"{name} (predicted {by}: {', '.join(others)}{slower})"
