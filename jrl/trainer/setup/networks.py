"""Trained networks of a run, each with its objective and its optimizer."""

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.recipes.base.optimizer import Optimizer
from jrl.rollout.collection.async_buffer import AsyncBufferSpec
from jrl.rollout.decoding.slots import Decoder
from jrl.trainer.learner.learner import Learner, init_learner, split
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from jrl.trainer.learner.overflow import with_dropless_buffers
from jrl.trainer.learner.update import update
from moe.adapters import trees
from moe.adapters.settings import Lora
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh

ObjectiveT = TypeVar("ObjectiveT", PolicyObjective, CriticObjective, SupervisedObjective)


@dataclass(frozen=True)
class Network(Generic[ObjectiveT]):
    """Trained network with its objective and its optimizer.

    Attributes:
      objective: the loss, with the network's config and mesh.
      optimizer: settings of the optimizer.
      num_micro_batches: of a mini-batch, on each device.
      bins: of a micro-batch, where rows are packed.
    """

    objective: ObjectiveT
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
        """Creates a learner, see `jrl.trainer.learner.learner.init_learner`."""
        return init_learner(self.optimizer, weights, self.config, self.mesh)

    def update(
        self,
        learner: Learner[Array],
        batch: Batch[Array],
        statistics: Any = None,
        passes: Array | None = None,
    ) -> tuple[Learner[Array], dict[str, Any]]:
        """Runs one optimizer step, see `jrl.trainer.learner.update.update`; on an overflow of the
        expert buffers it is recomputed with dropless ones (`jrl.trainer.learner.overflow`)."""
        learner, metrics = self._update_once(self.objective, learner, batch, statistics, passes)
        overflow = metrics.get("overflow", 0)
        # Without a buffer factor nothing is read, and the host does not block on the device.
        if "overflow" in metrics and int(overflow):
            # Nothing changed: the returned learner equals the donated one, in its buffers.
            objective = with_dropless_buffers(self.objective)
            learner, metrics = self._update_once(objective, learner, batch, statistics, passes)
            metrics["overflow"] = overflow
        return learner, metrics

    def _update_once(
        self,
        objective: Any,
        learner: Learner[Array],
        batch: Batch[Array],
        statistics: Any,
        passes: Array | None,
    ) -> tuple[Learner[Array], dict[str, Any]]:
        """Calls `jrl.trainer.learner.update.update`. A network with adapters donates only these:
        its frozen weights may be shared with others."""
        optimizer, num_micro_batches = self.optimizer, self.num_micro_batches
        if objective.config.lora is None:
            return update(
                objective, optimizer, num_micro_batches, learner, batch, statistics, passes
            )
        adapters, frozen = split(learner.weights, objective.config)
        learner = replace(learner, weights=adapters)
        learner, metrics = update(
            objective, optimizer, num_micro_batches, learner, batch, statistics, passes, frozen
        )
        return replace(learner, weights=trees.combine_trees(learner.weights, frozen)), metrics

    def with_mesh(self, mesh: FoldedMesh) -> "Network[ObjectiveT]":
        """Copy on another mesh."""
        return replace(self, objective=replace(self.objective, mesh=mesh))


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
      keeps_reference: true if there is a reference model, the initial policy; for a policy with
        adapters it needs no copy.
      packs: true if updates run packed rows (`jrl.trainer.packed.plan`).
      max_staleness: maximum staleness of training tokens, in versions of the policy.
      pool_spec: of an engine whose rows in flight keep their KV cache, None where that is
        recomputed.
      reward_components: names of the reward components that a verdict can have.
    """

    policy: Network[PolicyObjective]
    critic: Network[CriticObjective] | None
    keeps_reference: bool
    packs: bool = False
    max_staleness: int = 0
    pool_spec: PoolSpec | None = None
    reward_components: tuple[str, ...] = ()

    @property
    def mesh(self) -> FoldedMesh:
        return self.policy.mesh

    @property
    def ahead_spec(self) -> AsyncBufferSpec | None:
        """Sizes of the buffer of asynchronous rollouts; None without these."""
        if not self.max_staleness:
            return None
        policy = self.policy.objective
        return AsyncBufferSpec(
            policy.recipe,
            self.max_staleness,
            policy.layout.prompt_length,
            policy.response_length,
            policy.config if policy.recipe.router_replay == "R3" else None,
            self.reward_components,
        )

    def with_adapters(self, lora: Lora | None) -> "Networks":
        """Copy whose policy has other adapters, or none."""
        objective = self.policy.objective
        objective = replace(objective, config=replace(objective.config, lora=lora))
        return replace(self, policy=replace(self.policy, objective=objective))

    def with_mesh(self, mesh: FoldedMesh) -> "Networks":
        """Copy on another mesh."""
        critic = None if self.critic is None else self.critic.with_mesh(mesh)
        return replace(self, policy=self.policy.with_mesh(mesh), critic=critic)
