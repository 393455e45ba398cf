"""Expert replication and placement by measured load (EPLB), also while a server runs: replicas of
hot experts, packed onto devices.

Loads are numbers of tokens, or any other additive quantity. A slot holds one replica of an expert;
all devices have the same number of slots. The replicas of an expert share its load equally.

It is published that loads of decoding change slowly and that placements are recomputed from time to
time. The interval, the averaging of loads and the gain that justifies a move are not published:
here they are `RebalancingPolicy`.

References:
  DeepSeek-AI, "EPLB", 2025 (repository deepseek-ai/EPLB): `replicate_experts`, `pack`,
  `plan_placement`.
  Zhu et al., "MegaScale-Infer", 2025, section 6 (https://arxiv.org/abs/2504.02263) packs greedily,
  too, and re-balances.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


def pack(
    loads: Float[np.ndarray, " item"], num_bins: int, capacity: int | None = None
) -> Int[np.ndarray, " item"]:
    """Greedy packing: the bin of each item, heaviest item first, into the lightest bin with free
    capacity.

    If bins have no capacity the load of the fullest is at most ``4/3 - 1/(3 num_bins)`` times the
    fullest bin's load in the best packing, and otherwise at most ``2 - 1/num_bins`` times: every
    other bin has at least the load of the fullest without its first item, and that item is in some
    bin of the best packing, too.

    Args:
      capacity: items of a bin; None is any number.

    Raises:
      ValueError: where the items do not fit.

    References:
      Graham, "Bounds on multiprocessing timing anomalies", 1969, theorem 2.

    Examples:
      >>> pack(np.array([3.0, 3.0, 2.0, 2.0, 2.0]), 2).tolist()
      [0, 1, 0, 1, 0]
    """
    capacity = len(loads) if capacity is None else capacity
    if num_bins < 1 or num_bins * capacity < len(loads):
        raise ValueError(
            f"num_bins={num_bins} with capacity={capacity} do not hold {len(loads)} items: use "
            "more bins."
        )
    bin_loads, bin_sizes = np.zeros(num_bins), np.zeros(num_bins, int)
    bins = np.zeros(len(loads), int)
    for item in np.argsort(-loads, kind="stable"):
        # The first of equally light ones.
        lightest = int(np.argmin(np.where(bin_sizes < capacity, bin_loads, np.inf)))
        bins[item] = lightest
        bin_loads[lightest] += loads[item]
        bin_sizes[lightest] += 1
    return bins


def replicate_experts(
    loads: Float[np.ndarray, " expert"], num_slots: int
) -> Int[np.ndarray, " slot"]:
    """Expert of each slot: every expert once, then repeatedly the one whose replicas have the
    largest load, the first of equals.

    Raises:
      ValueError: with fewer slots than experts.
    """
    if num_slots < len(loads):
        raise ValueError(
            f"num_slots={num_slots} do not hold {len(loads)} experts: use at least as many slots."
        )
    counts, slot_experts = np.ones(len(loads)), list(range(len(loads)))
    for _ in range(num_slots - len(loads)):
        hottest = int(np.argmax(loads / counts))
        slot_experts.append(hottest)
        counts[hottest] += 1
    return np.array(slot_experts)


def slot_loads(
    loads: Float[np.ndarray, " expert"], slot_experts: Int[np.ndarray, " slot"]
) -> Float[np.ndarray, " slot"]:
    """Load of each slot."""
    return (loads / np.bincount(slot_experts, minlength=len(loads)))[slot_experts]


def device_loads(
    loads: Float[np.ndarray, " expert"], slot_experts: Int[np.ndarray, " slot"], num_devices: int
) -> Float[np.ndarray, " device"]:
    """Load of each device, with the slots in the order of devices."""
    return slot_loads(loads, slot_experts).reshape(num_devices, -1).sum(1)


def plan_placement(
    loads: Float[np.ndarray, " expert"],
    num_slots: int,
    num_devices: int,
    num_servers: int = 1,
    num_groups: int = 1,
) -> Int[np.ndarray, " slot"]:
    """Expert of each slot, in the order of servers, of their devices and of their slots.

    If servers divide the groups of experts (node-limited routing), each group stays in one server:
    groups are packed onto servers, experts are replicated within theirs, and replicas are packed
    onto its devices. Otherwise servers are ignored.

    With one server the load of the fullest device is at most ``2 - 1/num_devices`` times the load
    under the best replication and placement: no other replication has a lighter heaviest replica.

    Raises:
      ValueError: where groups do not divide the experts, servers the devices or devices the slots.
    """
    for title, total, name, divisor in (
        ("num_experts", len(loads), "num_groups", num_groups),
        ("num_devices", num_devices, "num_servers", num_servers),
        ("num_slots", num_slots, "num_devices", num_devices),
    ):
        if divisor < 1 or total % divisor:
            raise ValueError(f"{name}={divisor} must divide {title}={total}.")
    if num_groups % num_servers:
        num_groups = num_servers = 1
    # Experts of a group are neighbours, and remain so in their server.
    groups = np.arange(len(loads)).reshape(num_groups, -1)
    group_loads = loads[groups].sum(1)
    servers = pack(group_loads, num_servers, num_groups // num_servers)
    of_server = num_slots // num_servers, num_devices // num_servers
    return np.concatenate(
        [
            _plan_server(loads, groups[_items_of_bin(servers, i, group_loads)].ravel(), *of_server)
            for i in range(num_servers)
        ]
    )


def _items_of_bin(bins, bin_index: int, loads) -> Int[np.ndarray, " item"]:
    """Items of a bin in the order in which they were packed, the heaviest first."""
    (items,) = np.nonzero(bins == bin_index)
    return items[np.argsort(-loads[items], kind="stable")]


def _plan_server(loads, experts, num_slots: int, num_devices: int) -> Int[np.ndarray, " slot"]:
    slot_experts = replicate_experts(loads[experts], num_slots)
    loads_of_slots = slot_loads(loads[experts], slot_experts)
    if num_slots == num_devices:
        return experts[slot_experts]
    device = pack(loads_of_slots, num_devices, num_slots // num_devices)
    order = np.concatenate([_items_of_bin(device, i, loads_of_slots) for i in range(num_devices)])
    return experts[slot_experts[order]]


@dataclass(frozen=True)
class RebalancingPolicy:
    """Re-balancing policy: interval, averaging of loads, and least gain.

    Attributes:
      every: K, number of steps between two checks.
      decay: decay of the exponential average of loads per step, in [0, 1).
      threshold: fraction of the fullest device's load that a new placement must save, in [0, 1).
    """

    every: int = 1000
    decay: float = 0.999
    threshold: float = 0.05

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step.")
        for name in ("decay", "threshold"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1).")


class Sizes(NamedTuple):
    """Sizes of the expert side; see `plan_placement`."""

    num_slots: int
    num_devices: int
    num_servers: int = 1
    num_groups: int = 1


@dataclass(frozen=True)
class Balance:
    """State of re-balancing: average loads and the current placement.

    Attributes:
      step: number of steps observed.
      loads: exponential average of the tokens of each expert per step.
      slot_experts: expert of each slot.
    """

    step: int
    loads: Float[np.ndarray, "layer expert"]
    slot_experts: Int[np.ndarray, "layer slot"]


@dataclass(frozen=True)
class Move:
    """Replacement of the expert in a slot."""

    layer: int
    slot: int
    expert: int


def initial_balance(num_layers: int, num_experts: int, sizes: Sizes) -> Balance:
    """State before the first step: no loads, experts placed as if all loads were equal."""
    slot_experts = plan_placement(np.ones(num_experts), *sizes)
    return Balance(0, np.zeros((num_layers, num_experts)), np.tile(slot_experts, (num_layers, 1)))


def observe(
    balance: Balance, tokens: np.ndarray, sizes: Sizes, policy: RebalancingPolicy
) -> tuple[Balance, list[Move]]:
    """Updates the loads with a step: returns the new state, and the moves that its placement needs;
    none in most steps.

    The average starts with the first step and is a plain mean over the first few, so that it
    contains no initial value. A layer gets a new placement if the load of the fullest device would
    fall below ``1 - threshold`` of what it is. The new devices of a server are matched with the old
    ones so that as many experts as possible stay.

    Args:
      tokens: number of tokens of each expert in the step, ``[layer, expert]``.

    Raises:
      ValueError: on another shape.
    """
    if tokens.shape != balance.loads.shape:
        raise ValueError(
            f"tokens has shape {tokens.shape}, not {balance.loads.shape} (layers, experts)."
        )
    step = balance.step + 1
    decay = min(policy.decay, (step - 1) / step)
    loads = decay * balance.loads + (1 - decay) * tokens
    updated = replace(balance, step=step, loads=loads)
    if step % policy.every:
        return updated, []
    slot_experts, moves = balance.slot_experts.copy(), []
    for layer, load in enumerate(loads):
        new_slots = _better_placement(load, balance.slot_experts[layer], sizes, policy)
        if new_slots is not None:
            (slots,) = np.nonzero(new_slots != balance.slot_experts[layer])
            moves += [Move(layer, int(slot), int(new_slots[slot])) for slot in slots]
            slot_experts[layer] = new_slots
    return replace(updated, slot_experts=slot_experts), moves


def _better_placement(
    load, slot_experts, sizes: Sizes, policy: RebalancingPolicy
) -> np.ndarray | None:
    new = plan_placement(load, *sizes)
    fullest, new_fullest = (
        device_loads(load, slots, sizes.num_devices).max() for slots in (slot_experts, new)
    )
    if new_fullest >= (1 - policy.threshold) * fullest:
        return None
    old_servers, new_servers = (
        slots.reshape(sizes.num_servers, sizes.num_devices // sizes.num_servers, -1)
        for slots in (slot_experts, new)
    )
    return np.concatenate(
        [_match_devices(old, new) for old, new in zip(old_servers, new_servers, strict=True)]
    ).reshape(-1)


def _match_devices(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Reorders new devices to match old ones: greedily the pair with most experts in common; an
    expert that stays on a device stays in its slot."""
    shared = np.array([[_num_common(a, b) for b in new] for a in old])
    matched = np.empty_like(old)
    for _ in range(len(old)):
        old_device, new_device = np.unravel_index(np.argmax(shared), shared.shape)
        matched[old_device] = _align_slots(old[old_device], new[new_device])
        shared[old_device, :] = shared[:, new_device] = -1
    return matched


def _num_common(old: np.ndarray, new: np.ndarray) -> int:
    return int(sum(min(np.sum(old == expert), np.sum(new == expert)) for expert in np.unique(new)))


def _align_slots(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    unplaced, aligned = new.tolist(), np.full_like(old, -1)
    for slot, expert in enumerate(old.tolist()):
        if expert in unplaced:
            unplaced.remove(expert)
            aligned[slot] = expert
    aligned[aligned < 0] = unplaced
    return aligned
