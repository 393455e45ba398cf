"""Which devices hold which experts, and how often: replicas of hot ones, packed by measured load.

Loads are numbers of tokens, or anything else that adds up. A slot holds one copy of an expert; a
device has equally many slots. Copies of an expert take equal parts of its load.

References:
  DeepSeek-AI, "EPLB", 2025 (repository deepseek-ai/EPLB): `replicas`, `pack`, `placement`.
  Zhu et al., "MegaScale-Infer", 2025, section 6 (https://arxiv.org/abs/2504.02263) packs greedily,
  too.
"""

import numpy as np
from jaxtyping import Float, Int


def pack(
    loads: Float[np.ndarray, " item"], num_bins: int, capacity: int | None = None
) -> Int[np.ndarray, " item"]:
    """The bin of each item: the heaviest item first, into the lightest bin that has room.

    Without a capacity the fullest bin has at most ``4/3 - 1/(3 num_bins)`` times what it has in the
    best packing, and with one at most ``2 - 1/num_bins`` times: every other bin has at least what
    the fullest has beyond its first item, and that item is somewhere in the best packing, too.

    Args:
      capacity: items of a bin; None is any.

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
            f"num_bins={num_bins} of capacity={capacity} do not hold {len(loads)} items: take more."
        )
    held, number = np.zeros(num_bins), np.zeros(num_bins, int)
    found = np.zeros(len(loads), int)
    for item in np.argsort(-loads, kind="stable"):
        # The first of equally light ones.
        lightest = int(np.argmin(np.where(number < capacity, held, np.inf)))
        found[item] = lightest
        held[lightest] += loads[item]
        number[lightest] += 1
    return found


def replicas(loads: Float[np.ndarray, " expert"], num_slots: int) -> Int[np.ndarray, " slot"]:
    """The expert of each slot: every expert once, then again and again the one whose copies have
    most to do, the first of equals.

    Raises:
      ValueError: with fewer slots than experts.
    """
    if num_slots < len(loads):
        raise ValueError(
            f"num_slots={num_slots} do not hold {len(loads)} experts: take at least as many."
        )
    copies, found = np.ones(len(loads)), list(range(len(loads)))
    for _ in range(num_slots - len(loads)):
        hottest = int(np.argmax(loads / copies))
        found.append(hottest)
        copies[hottest] += 1
    return np.array(found)


def of_slots(
    loads: Float[np.ndarray, " expert"], placed: Int[np.ndarray, " slot"]
) -> Float[np.ndarray, " slot"]:
    """The load of each slot."""
    return (loads / np.bincount(placed, minlength=len(loads)))[placed]


def of_devices(
    loads: Float[np.ndarray, " expert"], placed: Int[np.ndarray, " slot"], num_devices: int
) -> Float[np.ndarray, " device"]:
    """The load of each device, its slots one after the other."""
    return of_slots(loads, placed).reshape(num_devices, -1).sum(1)


def placement(
    loads: Float[np.ndarray, " expert"],
    num_slots: int,
    num_devices: int,
    num_servers: int = 1,
    num_groups: int = 1,
) -> Int[np.ndarray, " slot"]:
    """The expert of each slot, the slots of a device and the devices of a server side by side.

    Groups of experts that a token is limited to stay in one server, if servers divide them: groups
    are packed onto servers, experts get copies within theirs, copies are packed onto its devices.
    Else servers do not count.

    With one server the fullest device has at most ``2 - 1/num_devices`` times what it has with the
    best copies in the best places: in `pack`, no others have a lighter heaviest copy.

    Raises:
      ValueError: where groups do not divide the experts, servers the devices or devices the slots.
    """
    for title, whole, name, part in (
        ("experts", len(loads), "num_groups", num_groups),
        ("num_devices", num_devices, "num_servers", num_servers),
        ("num_slots", num_slots, "num_devices", num_devices),
    ):
        if part < 1 or whole % part:
            raise ValueError(f"{name}={part} must divide the {whole} of {title}.")
    if num_groups % num_servers:
        num_groups = num_servers = 1
    # Experts of a group are neighbours, and remain so in their server.
    groups = np.arange(len(loads)).reshape(num_groups, -1)
    server = pack(loads[groups].sum(1), num_servers, num_groups // num_servers)
    return np.concatenate(
        [
            _in_server(
                loads,
                groups[_in_order(server, here, loads[groups].sum(1))].reshape(-1),
                num_slots // num_servers,
                num_devices // num_servers,
            )
            for here in range(num_servers)
        ]
    )


def _in_order(bins, here: int, loads) -> Int[np.ndarray, " item"]:
    """The items of a bin as they were put into it, the heaviest first."""
    (items,) = np.nonzero(bins == here)
    return items[np.argsort(-loads[items], kind="stable")]


def _in_server(loads, experts, num_slots: int, num_devices: int) -> Int[np.ndarray, " slot"]:
    chosen = replicas(loads[experts], num_slots)
    each = of_slots(loads[experts], chosen)
    if num_slots == num_devices:
        return experts[chosen]
    device = pack(each, num_devices, num_slots // num_devices)
    order = np.concatenate([_in_order(device, here, each) for here in range(num_devices)])
    return experts[chosen[order]]
