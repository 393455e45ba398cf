"""The networks that learn, each with what it minimises and how it steps."""

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.recipes.base.optimizer import Optimizer
from jrl.trainer.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from jrl.trainer.update import Learner, init_learner, update
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh

Kind = TypeVar("Kind", PolicyObjective, CriticObjective, SupervisedObjective)


@dataclass(frozen=True)
class Network(Generic[Kind]):
    """What one network learns by.

    Attributes:
      objective: what it minimises, and with that its configuration and its mesh.
      optimizer: how it steps.
      num_micro_batches: pieces that a mini-batch is cut into on each device.
      bins: of a micro-batch, where rows are packed.
    """

    objective: Kind
    optimizer: Optimizer
    num_micro_batches: int
    bins: int = 1

    @property
    def config(self) -> ModelConfig:
        return self.objective.config

    @property
    def mesh(self) -> FoldedMesh:
        return self.objective.mesh

    def init(self, weights: Transformer[Array]) -> Learner[Array]:
        """A learner at its first step."""
        return init_learner(self.optimizer, weights, self.config, self.mesh)

    def update(
        self,
        learner: Learner[Array],
        batch: Batch[Array],
        statistics: Any = None,
        passes: Array | None = None,
    ) -> tuple[Learner[Array], dict[str, Any]]:
        """One optimizer step, see `jrl.trainer.update.update`."""
        pieces = self.num_micro_batches
        return update(self.objective, self.optimizer, pieces, learner, batch, statistics, passes)

    def on(self, mesh: FoldedMesh) -> "Network[Kind]":
        """The same on another mesh."""
        return replace(self, objective=replace(self.objective, mesh=mesh))


@dataclass(frozen=True)
class Networks:
    """All that a recipe trains.

    Attributes:
      policy: what samples.
      critic: what values states, None without one.
      keeps_reference: whether the policy at the start of training is kept.
      packs: whether updates run packed rows (`jrl.trainer.packing`).
    """

    policy: Network[PolicyObjective]
    critic: Network[CriticObjective] | None
    keeps_reference: bool
    packs: bool = False

    @property
    def mesh(self) -> FoldedMesh:
        return self.policy.mesh

    def on(self, mesh: FoldedMesh) -> "Networks":
        """The same on another mesh."""
        critic = None if self.critic is None else self.critic.on(mesh)
        return replace(self, policy=self.policy.on(mesh), critic=critic)
