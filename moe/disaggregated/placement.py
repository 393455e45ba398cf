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
      replicas: for each expert the (device, slot) pairs that hold it; one or more.
      num_devices: number of devices along ``ep``.
      num_slots: number of slots of a device.

    Raises:
      ValueError: if an expert has no slot, or a slot does not exist or holds two experts.
    """

    replicas: tuple[tuple[tuple[int, int], ...], ...]
    num_devices: int
    num_slots: int

    def __post_init__(self):
        seen: dict[tuple[int, int], int] = {}
        for expert, slots in enumerate(self.replicas):
            if not slots:
                raise ValueError(f"expert {expert} has no slot: give every expert one or more.")
            for device, slot in slots:
                if not (0 <= device < self.num_devices and 0 <= slot < self.num_slots):
                    raise ValueError(
                        f"expert {expert} is placed on slot {slot} of device {device}, but there "
                        f"are only {self.num_slots} slots on each of {self.num_devices} devices."
                    )
                if (device, slot) in seen:
                    raise ValueError(
                        f"slot {slot} of device {device} holds the experts "
                        f"{seen[device, slot]} and {expert}: use a slot for each."
                    )
                seen[device, slot] = expert

    @classmethod
    def identity(cls, num_experts: int, num_devices: int) -> "Placement":
        """Placement of each expert once, in order.

        Raises:
          ValueError: if the number of devices does not divide that of experts.
        """
        if num_experts % num_devices:
            raise ValueError(
                f"num_experts={num_experts} cannot be split over ep={num_devices} devices: choose "
                "an ep that divides it."
            )
        each = num_experts // num_devices
        replicas = tuple((divmod(expert, each),) for expert in range(num_experts))
        return cls(replicas, num_devices, each)

    @classmethod
    def from_slots(cls, slot_experts: Int[np.ndarray, "slot"], num_devices: int) -> "Placement":
        """Placement from the expert in each slot, device after device: the inverse of `experts` if
        no slot is empty. Every expert up to the largest id needs a slot."""
        each = len(slot_experts) // num_devices
        replicas = [list[tuple[int, int]]() for _ in range(int(slot_experts.max()) + 1)]
        for slot, expert in enumerate(slot_experts.tolist()):
            replicas[expert].append(divmod(slot, each))
        return cls(tuple(map(tuple, replicas)), num_devices, each)

    @property
    def experts(self) -> Int[np.ndarray, "slot"]:
        """Expert in each slot, device after device; expert 0 in empty slots, which no token is sent
        to."""
        slot_experts = np.zeros(self.num_devices * self.num_slots, np.int32)
        for expert, slots in enumerate(self.replicas):
            for device, slot in slots:
                slot_experts[device * self.num_slots + slot] = expert
        return slot_experts

    @property
    def is_identity(self) -> bool:
        """True if the slots hold the experts in order, each once."""
        slot_experts = self.experts
        return len(slot_experts) == len(self.replicas) and bool(
            np.all(slot_experts == np.arange(len(slot_experts)))
        )

    def slot_table(self) -> SlotTable:
        """Lookup table for the attention side. Its shape depends only on the numbers of experts
        and slots, so that another placement needs no new program."""
        spare = self.num_devices * self.num_slots - len(self.replicas)
        width = 1 + spare
        slots = np.full(
            (len(self.replicas) + 1, width), self.num_devices * self.num_slots, np.int32
        )
        for expert, pairs in enumerate(self.replicas):
            indices = [device * self.num_slots + slot for device, slot in pairs]
            slots[expert] = (indices + indices[-1:] * width)[:width]
        counts = np.array([*map(len, self.replicas), 1], np.int32)
        return SlotTable(slots, counts)


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

    Args:
      experts: expert ids; `num_experts` for none gives the index past the last slot.
    """
    token = jnp.arange(experts.shape[0], dtype=experts.dtype)[:, None]
    slots, counts = jnp.asarray(table.slots), jnp.asarray(table.counts)
    return slots[experts, token % counts[experts]]
