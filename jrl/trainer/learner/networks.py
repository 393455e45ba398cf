"""Trained networks of a run, each with its objective and its optimizer."""

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.collection.async_buffer import AsyncBufferSpec
from jrl.rollout.decoding.slots import Decoder
from jrl.trainer.learner.learner import Learner, init_learner, split
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from jrl.trainer.learner.synchronous import warn_if_synchronous
from jrl.trainer.learner.update import update
from moe.adapters import trees
from moe.architecture.lora import Lora
from moe.config import ModelConfig
from moe.router.statistics import run_with_fallback
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
        expert buffers it is recomputed with dropless ones.

        A network with adapters donates only these: its frozen weights may be shared with others.
        """

        def run(
            objective: ObjectiveT, learner: Learner[Array]
        ) -> tuple[tuple[Learner[Array], dict[str, Any]], Array | None]:
            settings = objective, self.optimizer, self.num_micro_batches
            if objective.config.lora is None:
                learner, metrics = _update(*settings, learner, batch, statistics, passes)
                return (learner, metrics), metrics.get("overflow")
            adapters, frozen = split(learner.weights, objective.config)
            learner = replace(learner, weights=adapters)
            learner, metrics = _update(*settings, learner, batch, statistics, passes, frozen)
            learner = replace(learner, weights=trees.combine_trees(learner.weights, frozen))
            return (learner, metrics), metrics.get("overflow")

        def without_overflow(
            result: tuple[Learner[Array], dict[str, Any]],
        ) -> tuple[Learner[Array], dict[str, Any]]:
            # Nothing changed: the returned learner equals the donated one, in its buffers.
            learner, first_metrics = result
            (learner, metrics), _ = run(self.objective.for_any_routing(), learner)
            return learner, metrics | {"overflow": first_metrics["overflow"]}

        return run_with_fallback(lambda: run(self.objective, learner), without_overflow)[0]

    def with_mesh(self, mesh: FoldedMesh) -> "Network[ObjectiveT]":
        """Copy on another mesh."""
        return replace(self, objective=replace(self.objective, mesh=mesh))


def _update(*args: Any) -> tuple[Learner[Array], dict[str, Any]]:
    """`update`; its first call says if the compiled program lacks the requested overlap."""
    warn_if_synchronous(update, 3, *args)
    return update(*args)


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
