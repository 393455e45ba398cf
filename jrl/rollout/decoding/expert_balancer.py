"""Expert placement during decoding, re-balanced periodically by the loads of the experts."""

import numpy as np

from moe.config import ModelConfig
from moe.disaggregated.balance import Balance, RebalancingPolicy, Sizes, initial_balance, observe
from moe.disaggregated.placement import Placement
from moe.disaggregated.split import SplitMesh

EQUAL_WEIGHTS = RebalancingPolicy(every=1, decay=1 - 1e-9)
"""Each re-balancing may move experts, and all loads since the start have equal weight."""


class ExpertBalancer:
    """Expert placements of all layers, and the loads that they are planned by.

    Args:
      config: the network, an MoE model.
      mesh: mesh of both device groups.
      slots: expert slots of each device along ``ep``; None is its share of the experts.
      every: tokens of a row between two re-balancings; None never re-balances.
      decays: true for an exponential decay of older loads (`RebalancingPolicy.decay` for each
        token of a row), false for equal weights since the start.

    Attributes:
      moves: total number of slots that got another expert.
      has_moved: true if one has since the start.

    Raises:
      ValueError: for slots that do not hold all experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: SplitMesh,
        slots: int | None,
        every: int | None,
        *,
        decays: bool = False,
    ):
        first = first_placement(config, mesh, slots)
        first = first or Placement.identity(config.num_experts, mesh.experts.size(mesh.experts.ep))
        self._sizes = Sizes(first.num_slots * first.num_devices, first.num_devices)
        self._first = np.tile(first.experts, (config.num_expert_layers, 1))
        self._no_loads = np.zeros((config.num_expert_layers, config.num_experts))
        self.every, self.moves, self._policy = every, 0, EQUAL_WEIGHTS
        if decays and every is not None:
            self._policy = RebalancingPolicy(every=1, decay=RebalancingPolicy.decay**every)
        self.restart()

    def restart(self) -> None:
        """Resets to the initial placement for equal loads."""
        # So that the samples of a rollout depend on its requests only, not on earlier rollouts.
        self._tokens, self._balance = 0, Balance(0, self._no_loads, self._first)
        self.has_moved = False

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placement of each layer with experts."""
        devices = self._sizes.num_devices
        return tuple(
            Placement.from_slots(experts, devices) for experts in self._balance.slot_experts
        )

    def limit_tokens(self, tokens: int) -> int:
        """Bounds `tokens` of each row by those that are left until the next re-balancing."""
        return tokens if self.every is None else min(tokens, self.every - self._tokens)

    def is_due(self, tokens: int) -> bool:
        """Adds `tokens` decoded by each row; returns true if a re-balancing is due."""
        self._tokens += tokens
        return self.every is not None and self._tokens >= self.every

    def rebalance(self, loads: np.ndarray) -> bool:
        """Re-balances the experts; returns true if one moves.

        Args:
          loads: tokens of each expert since the last call, ``[layer, expert]``.
        """
        self._tokens = 0
        self._balance, moves = observe(self._balance, loads, self._sizes, self._policy)
        self.moves += len(moves)
        self.has_moved |= bool(moves)
        return bool(moves)


def first_placement(config: ModelConfig, mesh: SplitMesh, slots: int | None) -> Placement | None:
    """Initial placement, for equal loads; None places each expert once, in their order.

    Args:
      slots: slots of each device along ``ep``; None is its share.

    Raises:
      ValueError: for slots that do not hold all experts.
    """
    if slots is None or not config.num_experts:
        return None
    devices = mesh.experts.size(mesh.experts.ep)
    if slots * devices < config.num_experts:
        raise ValueError(
            f"expert_slots={slots} on ep={devices} devices do not hold "
            f"{config.num_experts} experts: give {-(-config.num_experts // devices)} or more."
        )
    placed = initial_balance(1, config.num_experts, Sizes(slots * devices, devices)).slot_experts[0]
    return Placement.from_slots(placed, devices)
