"""Placement of experts in the slots of the expert devices: each once, or hot ones replicated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class SlotTable(NamedTuple):
    """Lookup table of a placement for the attention side.

    Attributes:
      slots: ``[expert + 1, replica]`` indices of the slots that hold the expert, counted device
        after device; past the expert's replicas the last one is repeated. The last row, for no
        expert, holds the index past the last slot.
      counts: ``[expert + 1]`` number of replicas; 1 in the last row.
    """

    slots: Array | np.ndarray
    counts: Array | np.ndarray


@dataclass(frozen=True)
class Placement:
    """Placement of experts in slots of the devices along ``ep``, equally many on each.

    Args:
      slot_experts: expert in each slot, device after device; several slots may hold one.
      num_devices: number of devices along ``ep``.

    Raises:
      ValueError: if an expert up to the largest id has no slot.
    """

    slot_experts: tuple[int, ...]
    num_devices: int

    def __post_init__(self):
        if absent := set(range(self.num_experts)) - {*self.slot_experts}:
            raise ValueError(f"expert {min(absent)} has no slot: give every expert one or more.")

    @classmethod
    def identity(cls, num_experts: int, num_devices: int) -> "Placement":
        """Placement of each expert once, in order.

        Raises:
          ValueError: if the number of devices does not divide the number of experts.
        """
        if num_experts % num_devices:
            raise ValueError(
                f"num_experts={num_experts} cannot be split over ep={num_devices} devices: choose "
                "an ep that divides it."
            )
        return cls(tuple(range(num_experts)), num_devices)

    @classmethod
    def from_slots(cls, slot_experts: Int[np.ndarray, "slot"], num_devices: int) -> "Placement":
        """Placement from the expert in each slot, device after device: the inverse of `experts`."""
        return cls(tuple(slot_experts.tolist()), num_devices)

    @property
    def num_experts(self) -> int:
        return max(self.slot_experts) + 1

    @property
    def num_slots(self) -> int:
        """Number of slots of a device."""
        return len(self.slot_experts) // self.num_devices

    @property
    def experts(self) -> Int[np.ndarray, "slot"]:
        """Expert in each slot, device after device."""
        return np.array(self.slot_experts, np.int32)

    @property
    def is_identity(self) -> bool:
        """True if the slots hold the experts in order, each once."""
        return self.slot_experts == tuple(range(self.num_experts))

    def slot_table(self) -> SlotTable:
        """Lookup table for the attention side. Its shape depends only on the numbers of experts
        and slots, so that another placement needs no new program."""
        experts, num_slots, num_experts = self.experts, len(self.slot_experts), self.num_experts
        width = 1 + num_slots - num_experts
        slots = np.full((num_experts + 1, width), num_slots, np.int32)
        for expert in range(num_experts):
            indices = np.flatnonzero(experts == expert)
            slots[expert] = np.pad(indices, (0, width - len(indices)), "edge")
        return SlotTable(slots, np.append(np.bincount(experts), 1).astype(np.int32))


def layer_placements(
    placement: Placement | Sequence[Placement], num_layers: int
) -> tuple[Placement, ...]:
    """Placement of each layer with experts, from one for all layers or one for each.

    Raises:
      ValueError: for a wrong number of placements, or ones that differ in devices or slots.
    """
    placements = (placement,) * num_layers if isinstance(placement, Placement) else tuple(placement)
    if len(placements) != num_layers:
        raise ValueError(
            f"{len(placements)} placements were given for {num_layers} layers: give one per layer."
        )
    if len({(each.num_devices, each.num_slots) for each in placements}) > 1:
        raise ValueError(
            "the placements of layers differ in devices or slots: use the same number for all."
        )
    return placements


def lookup_slots(experts: Int[Array, "token k"], table: SlotTable) -> Int[Array, "token k"]:
    """Slot that each expert id of a token is sent to; neighbouring tokens use different replicas.
    The id `num_experts`, for none, gives the index past the last slot."""
    token = jnp.arange(experts.shape[0], dtype=experts.dtype)[:, None]
    slots, counts = jnp.asarray(table.slots), jnp.asarray(table.counts)
    return slots[experts, token % counts[experts]]
