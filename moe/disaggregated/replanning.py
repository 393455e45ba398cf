"""Re-balancing of experts between devices while a server runs (EPLB).

It is published that loads of decoding change slowly and that placements are recomputed from time to
time (Zhu et al., "MegaScale-Infer", 2025, section 6). The interval, the averaging of loads and the
gain that justifies a move are not published: here they are `RebalancingPolicy`.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from moe.disaggregated.balance import device_loads, plan_placement


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


@dataclass(frozen=True)
class Sizes:
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
    slot_experts = plan_placement(
        np.ones(num_experts),
        sizes.num_slots,
        sizes.num_devices,
        sizes.num_servers,
        sizes.num_groups,
    )
    return Balance(0, np.zeros((num_layers, num_experts)), np.tile(slot_experts, (num_layers, 1)))


def observe(
    balance: Balance, tokens: np.ndarray, sizes: Sizes, policy: RebalancingPolicy
) -> tuple[Balance, list[Move]]:
    """Updates the loads with a step: returns the new state, and the moves that its placement needs;
    none in most steps.

    The average starts with the first step and is a plain mean over the first few, so that it
    contains no initial value. A layer gets a new placement if the load of the fullest device would
    fall below ``1 - threshold`` of what it is. The new devices of a server are matched with the old
    ones so that experts stay where they can.

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
    new = plan_placement(
        load, sizes.num_slots, sizes.num_devices, sizes.num_servers, sizes.num_groups
    )
    fullest, new_fullest = (
        device_loads(load, one, sizes.num_devices).max() for one in (slot_experts, new)
    )
    if new_fullest >= (1 - policy.threshold) * fullest:
        return None
    old_servers, new_servers = (
        one.reshape(sizes.num_servers, sizes.num_devices // sizes.num_servers, -1)
        for one in (slot_experts, new)
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
    return int(sum(min(np.sum(old == one), np.sum(new == one)) for one in np.unique(new)))


def _align_slots(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    unplaced, aligned = new.tolist(), np.full_like(old, -1)
    for slot, expert in enumerate(old.tolist()):
        if expert in unplaced:
            unplaced.remove(expert)
            aligned[slot] = expert
    aligned[aligned < 0] = unplaced
    return aligned
