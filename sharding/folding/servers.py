"""Servers: the devices that fast links join, and the part of a group of devices in each."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from sharding.collectives import IndexGroups
from sharding.folding import FoldedMesh
from sharding.folding.groups import axis_groups


class ServerGroups(NamedTuple):
    """Split of the devices along mesh axes by their servers.

    Attributes:
      servers: servers that each group along the axes spans.
      devices: members of a group in one server, which are neighbours along the axes.
    """

    servers: int
    devices: int

    @property
    def inside(self) -> IndexGroups:
        """Indices along the axes of the devices of each server."""
        starts = range(0, self.servers * self.devices, self.devices)
        return tuple(tuple(range(start, start + self.devices)) for start in starts)

    @property
    def across(self) -> IndexGroups:
        """Indices along the axes of one device of each server, which have equal ranks in theirs."""
        return tuple(zip(*self.inside, strict=True))


def server_groups(mesh: FoldedMesh, axes: Sequence[str], server_devices: int) -> ServerGroups:
    """Split of the groups along `axes` by servers, each of `server_devices` consecutive ranks.

    Raises:
      ValueError: where groups have unequal parts in their servers.
    """
    splits = {_parts(group, server_devices) for group in axis_groups(mesh, axes)}
    parts = max(splits, key=len)
    if len(splits) > 1 or len(set(parts)) > 1:
        raise ValueError(
            f"servers of {server_devices} devices cut groups of {sum(parts)} of layout "
            f"{mesh.layout} into unequal parts, such as {', '.join(map(str, parts))}: choose "
            "sizes that divide each other."
        )
    return ServerGroups(len(parts), parts[0])


def _parts(ranks: Sequence[int], server_devices: int) -> tuple[int, ...]:
    """Number of consecutive ranks in each server."""
    runs = itertools.groupby(rank // server_devices for rank in ranks)
    return tuple(len(list(run)) for _, run in runs)
