"""Expert replication and placement by measured load (EPLB): replicas of hot experts, packed onto
devices.

Loads are numbers of tokens, or any other additive quantity. A slot holds one replica of an expert;
all devices have the same number of slots. The replicas of an expert share its load equally.

References:
  DeepSeek-AI, "EPLB", 2025 (repository deepseek-ai/EPLB): `replicate_experts`, `pack`,
  `plan_placement`.
  Zhu et al., "MegaScale-Infer", 2025, section 6 (https://arxiv.org/abs/2504.02263) packs greedily,
  too.
"""

import numpy as np
from jaxtyping import Float, Int


def pack(
    loads: Float[np.ndarray, " item"], num_bins: int, capacity: int | None = None
) -> Int[np.ndarray, " item"]:
    """Greedy packing: the bin of each item, heaviest item first, into the lightest bin with free
    capacity.

    Without a capacity the load of the fullest bin is at most ``4/3 - 1/(3 num_bins)`` times that of
    the best packing, and with one at most ``2 - 1/num_bins`` times: every other bin has at least
    the load of the fullest without its first item, and that item is in some bin of the best
    packing, too.

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

    With one server the load of the fullest device is at most ``2 - 1/num_devices`` times that of
    the best replication and placement: no other replication has a lighter heaviest replica.

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
    server = pack(loads[groups].sum(1), num_servers, num_groups // num_servers)
    return np.concatenate(
        [
            _plan_server(
                loads,
                groups[_items_of_bin(server, server_index, loads[groups].sum(1))].reshape(-1),
                num_slots // num_servers,
                num_devices // num_servers,
            )
            for server_index in range(num_servers)
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
    order = np.concatenate(
        [_items_of_bin(device, device_index, loads_of_slots) for device_index in range(num_devices)]
    )
    return experts[slot_experts[order]]
