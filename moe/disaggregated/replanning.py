"""Re-balancing of experts between devices while a server runs (EPLB).

It is published that loads of decoding change slowly and that placements are recomputed from time to
time (Zhu et al., "MegaScale-Infer", 2025, section 6). The interval, the averaging of loads and the
gain that justifies a move are not published: here they are `Policy`.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from moe.disaggregated.balance import of_devices, placement


@dataclass(frozen=True)
class Policy:
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
    """Sizes of the expert side; see `placement`."""

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
      placed: expert of each slot.
    """

    step: int
    loads: Float[np.ndarray, "layer expert"]
    placed: Int[np.ndarray, "layer slot"]


@dataclass(frozen=True)
class Move:
    """Replacement of the expert in a slot."""

    layer: int
    slot: int
    expert: int


def start(num_layers: int, num_experts: int, sizes: Sizes) -> Balance:
    """State before the first step: no loads, experts placed as if all loads were equal."""
    placed = placement(
        np.ones(num_experts),
        sizes.num_slots,
        sizes.num_devices,
        sizes.num_servers,
        sizes.num_groups,
    )
    return Balance(0, np.zeros((num_layers, num_experts)), np.tile(placed, (num_layers, 1)))


def observe(
    balance: Balance, tokens: np.ndarray, sizes: Sizes, policy: Policy
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
            f"tokens of shape {tokens.shape} are not of {balance.loads.shape} layers and experts."
        )
    step = balance.step + 1
    kept = min(policy.decay, (step - 1) / step)
    loads = kept * balance.loads + (1 - kept) * tokens
    seen = replace(balance, step=step, loads=loads)
    if step % policy.every:
        return seen, []
    placed, moves = balance.placed.copy(), []
    for layer, load in enumerate(loads):
        new = _better(load, balance.placed[layer], sizes, policy)
        if new is not None:
            (slots,) = np.nonzero(new != balance.placed[layer])
            moves += [Move(layer, int(slot), int(new[slot])) for slot in slots]
            placed[layer] = new
    return replace(seen, placed=placed), moves


def _better(load, placed, sizes: Sizes, policy: Policy) -> np.ndarray | None:
    new = placement(load, sizes.num_slots, sizes.num_devices, sizes.num_servers, sizes.num_groups)
    fullest, would_be = (of_devices(load, one, sizes.num_devices).max() for one in (placed, new))
    if would_be >= (1 - policy.threshold) * fullest:
        return None
    old_servers, new_servers = (
        one.reshape(sizes.num_servers, sizes.num_devices // sizes.num_servers, -1)
        for one in (placed, new)
    )
    return np.concatenate(
        [_matched(old, new) for old, new in zip(old_servers, new_servers, strict=True)]
    ).reshape(-1)


def _matched(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Reorders new devices to match old ones: greedily the pair with most experts in common; an
    expert that stays on a device stays in its slot."""
    shared = np.array([[_common(a, b) for b in new] for a in old])
    found = np.empty_like(old)
    for _ in range(len(old)):
        here, there = np.unravel_index(np.argmax(shared), shared.shape)
        found[here] = _in_slots(old[here], new[there])
        shared[here, :] = shared[:, there] = -1
    return found


def _common(old: np.ndarray, new: np.ndarray) -> int:
    return int(sum(min(np.sum(old == one), np.sum(new == one)) for one in np.unique(new)))


def _in_slots(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    left, found = new.tolist(), np.full_like(old, -1)
    for slot, expert in enumerate(old.tolist()):
        if expert in left:
            left.remove(expert)
            found[slot] = expert
    found[found < 0] = left
    return found
