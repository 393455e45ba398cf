"""Sizes of the buffers of token dispatch: tokens per peer, and rows per device."""

import math

from sharding.folding import FoldedMesh

ROW_TILE = 32
"""Rows that budgets are rounded up to: the smaller tile of the grouped product "tiles"."""


def peer_assignments(num_tokens: int, k: int, num_local: int, capacity: int | None) -> int:
    """Largest number of expert ids that one device can send to another: ``min(T min(k, L), C L)``.

    A token has an expert once (`without_repeats` ensures it), so that it has at most ``min(k, L)``
    of the L experts of a device.
    """
    most = num_tokens * min(k, num_local)
    return most if capacity is None else min(most, capacity * num_local)


def buffer_rows(
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
    buffer_factor: float | None = None,
) -> int:
    """Largest number of rows that the experts of one device compute, for any routing.

    With ``n = ep etp`` devices that share experts these are the `peer_assignments` of each, or with
    a `buffer_factor` F and if that is less ``F T k etp``, as even routing gives with F = 1, rounded
    up to whole tiles that the n devices can share.
    """
    devices = mesh.size(mesh.ep) * mesh.size(mesh.etp)
    most = devices * peer_assignments(num_tokens, k, num_local, capacity)
    if buffer_factor is None:
        return most
    unit = math.lcm(ROW_TILE, devices)
    # A product that is an integer up to rounding counts as that integer.
    even = round(buffer_factor * num_tokens * k * mesh.size(mesh.etp), 9)
    return min(most, math.ceil(even / unit) * unit)


def peer_tokens(
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
    buffer_factor: float | None = None,
) -> int:
    """Largest number of tokens that one device can send to another, with buffers of equal size.

    A token is sent to a device once, however many of its experts are there: these are ``min(T, C
    L)``, and no more than a device's share of `buffer_rows`.
    """
    devices = mesh.size(mesh.ep) * mesh.size(mesh.etp)
    most = num_tokens if capacity is None else min(num_tokens, capacity * num_local)
    rows = buffer_rows(num_tokens, k, num_local, mesh, capacity, buffer_factor)
    return min(most, -(-rows // devices))
