"""Which slots of the expert devices hold which expert: each once, or hot ones several times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class Copies(NamedTuple):
    """A placement as the attention side reads it.

    Attributes:
      slots: ``[expert + 1, copy]`` the numbers of the slots that hold the expert, device after
        device, its last one again where others have more copies. The last row, of the expert that
        is none, holds the number past the last slot.
      counts: ``[expert + 1]`` how many of them there are.
    """

    slots: Array | np.ndarray
    counts: Array | np.ndarray


@dataclass(frozen=True)
class Placement:
    """Slots of the devices along ``ep``, as many on each, and the experts in them.

    Args:
      copies: for each expert the (device, slot) pairs that hold it; one or more.
      num_devices: along ``ep``.
      num_slots: of a device.

    Raises:
      ValueError: where an expert is nowhere, a slot is not there or holds two.
    """

    copies: tuple[tuple[tuple[int, int], ...], ...]
    num_devices: int
    num_slots: int

    def __post_init__(self):
        seen: dict[tuple[int, int], int] = {}
        for expert, places in enumerate(self.copies):
            if not places:
                raise ValueError(f"expert {expert} has no slot: give every expert one or more.")
            for device, slot in places:
                if not (0 <= device < self.num_devices and 0 <= slot < self.num_slots):
                    raise ValueError(
                        f"expert {expert} is placed on slot {slot} of device {device}, and there "
                        f"are {self.num_slots} slots on each of {self.num_devices} devices."
                    )
                if (device, slot) in seen:
                    raise ValueError(
                        f"slot {slot} of device {device} holds the experts "
                        f"{seen[device, slot]} and {expert}: give each its own."
                    )
                seen[device, slot] = expert

    @classmethod
    def of(cls, copies: Sequence[Sequence[tuple[int, int]]], num_devices: int) -> "Placement":
        """With as many slots as the fullest device needs."""
        given = tuple(tuple((int(d), int(s)) for d, s in places) for places in copies)
        num_slots = 1 + max((slot for places in given for _, slot in places), default=0)
        return cls(given, num_devices, num_slots)

    @classmethod
    def identity(cls, num_experts: int, num_devices: int) -> "Placement":
        """Each expert once, in their order.

        Raises:
          ValueError: where the devices would not have equally many.
        """
        if num_experts % num_devices:
            raise ValueError(
                f"num_experts={num_experts} cannot be spread over ep={num_devices} devices: choose "
                "an ep that divides it."
            )
        each = num_experts // num_devices
        copies = tuple((divmod(expert, each),) for expert in range(num_experts))
        return cls(copies, num_devices, each)

    @classmethod
    def holding(cls, experts: Int[np.ndarray, "slot"], num_devices: int) -> "Placement":
        """Of the expert in each slot, device after device; the inverse of `experts`."""
        each = len(experts) // num_devices
        copies = [list[tuple[int, int]]() for _ in range(int(experts.max()) + 1)]
        for slot, expert in enumerate(experts.tolist()):
            copies[expert].append(divmod(slot, each))
        return cls(tuple(map(tuple, copies)), num_devices, each)

    @property
    def experts(self) -> Int[np.ndarray, "slot"]:
        """The expert in each slot, device after device; expert 0 in slots that hold none, which
        nothing is sent to."""
        held = np.zeros(self.num_devices * self.num_slots, np.int32)
        for expert, places in enumerate(self.copies):
            for device, slot in places:
                held[device * self.num_slots + slot] = expert
        return held

    @property
    def is_identity(self) -> bool:
        """Whether the slots hold the experts in their order, each once."""
        held = self.experts
        return len(held) == len(self.copies) and bool(np.all(held == np.arange(len(held))))

    def table(self) -> Copies:
        """As the attention side reads it; of one shape, whichever experts have the copies."""
        spare = self.num_devices * self.num_slots - len(self.copies)
        width = 1 + spare
        slots = np.full((len(self.copies) + 1, width), self.num_devices * self.num_slots, np.int32)
        for expert, places in enumerate(self.copies):
            own = [device * self.num_slots + slot for device, slot in places]
            slots[expert] = (own + own[-1:] * width)[:width]
        counts = np.array([*map(len, self.copies), 1], np.int32)
        return Copies(slots, counts)


def of_layers(placement: Placement | Sequence[Placement], num_layers: int) -> tuple[Placement, ...]:
    """A placement for each layer with experts: one for all of them, or its own.

    Raises:
      ValueError: for another number of them, or devices with other numbers of slots.
    """
    each = (placement,) * num_layers if isinstance(placement, Placement) else tuple(placement)
    if len(each) != num_layers:
        raise ValueError(f"{len(each)} placements are none of {num_layers} layers: give one each.")
    if len({(one.num_devices, one.num_slots) for one in each}) > 1:
        raise ValueError("the placements of layers differ in their slots: give all as many.")
    return each


def slots_of_choices(experts: Int[Array, "token k"], copies: Copies) -> Int[Array, "token k"]:
    """The slot that each choice is sent to: of several copies, neighbouring tokens take different
    ones.

    Args:
      experts: ids, `num_experts` for none, which goes past the last slot.
    """
    token = jnp.arange(experts.shape[0], dtype=experts.dtype)[:, None]
    slots, counts = jnp.asarray(copies.slots), jnp.asarray(copies.counts)
    return slots[experts, token % counts[experts]]
