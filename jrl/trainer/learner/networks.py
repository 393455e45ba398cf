"""Networks that a recipe trains, and the sizes of what else the state of its run holds."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from jrl.recipes.base.recipe import Recipe
from jrl.rollout.collection.async_collector import AsyncBufferSpec
from jrl.rollout.decoding.slots import Decoder
from jrl.trainer.learner.update import CriticObjective, Network, PolicyObjective
from moe.architecture.lora import Lora
from sharding.folding import FoldedMesh


class PoolSpec(NamedTuple):
    """Sizes of an engine's slot pool that is a part of the state of a run.

    Attributes:
      decoder: static settings of decoding.
      slots: number of rows.
      columns: maximum tokens of a row.
    """

    decoder: Decoder
    slots: int
    columns: int


@dataclass(frozen=True)
class Networks:
    """Networks that a recipe trains.

    Attributes:
      policy: the policy network.
      critic: the value network, None without one.
      packs: true if updates run packed rows (`jrl.rollout.packing`).
      ahead_spec: sizes of the buffer of asynchronous rollouts; None without these.
      pool_spec: of an engine whose rows in flight keep their KV cache, None where that is
        recomputed.
    """

    policy: Network[PolicyObjective]
    critic: Network[CriticObjective] | None
    packs: bool = False
    ahead_spec: AsyncBufferSpec | None = None
    pool_spec: PoolSpec | None = None

    @property
    def recipe(self) -> Recipe:
        return self.policy.objective.recipe

    @property
    def mesh(self) -> FoldedMesh:
        return self.policy.mesh

    def with_adapters(self, lora: Lora | None) -> "Networks":
        """Copy whose policy has other adapters, or none."""
        objective = self.policy.objective
        objective = replace(objective, config=replace(objective.config, lora=lora))
        return replace(self, policy=replace(self.policy, objective=objective))

    def with_mesh(self, mesh: FoldedMesh) -> "Networks":
        """Copy on another mesh."""
        critic = None if self.critic is None else self.critic.with_mesh(mesh)
        return replace(self, policy=self.policy.with_mesh(mesh), critic=critic)
