"""The networks that learn, each with what it minimises and how it steps."""

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.recipes.base.optimizer import Optimizer
from jrl.rollout.collection.ahead import AheadSpec
from jrl.rollout.decoding.programs.slots import Decoder
from jrl.trainer.learner.learner import Learner, init_learner, split
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from jrl.trainer.learner.overflow import for_any_routing
from jrl.trainer.learner.update import update
from moe.adapters import trees
from moe.adapters.settings import Lora
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
      num_micro_batches: of a mini-batch, on each device.
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
        """A learner at its first step, see `jrl.trainer.learner.learner.init_learner`."""
        return init_learner(self.optimizer, weights, self.config, self.mesh)

    def update(
        self,
        learner: Learner[Array],
        batch: Batch[Array],
        statistics: Any = None,
        passes: Array | None = None,
    ) -> tuple[Learner[Array], dict[str, Any]]:
        """One optimizer step, see `jrl.trainer.learner.update.update`; where there was no room for
        all that the routers chose it is taken again with room for any routing
        (`jrl.trainer.learner.overflow`)."""
        how, given = (self.optimizer, self.num_micro_batches), (batch, statistics, passes)
        learner, metrics = _updated(self.objective, *how, learner, *given)
        overflow = metrics.get("overflow", 0)
        # Without a buffer factor nothing is asked, and the host need not wait for the device.
        if "overflow" in metrics and int(overflow):
            # Nothing moved: the learner that came back is the one that was given up, in its
            # buffers.
            objective = for_any_routing(self.objective)
            learner, metrics = _updated(objective, *how, learner, *given)
            metrics["overflow"] = overflow
        return learner, metrics

    def on(self, mesh: FoldedMesh) -> "Network[Kind]":
        """The same on another mesh."""
        return replace(self, objective=replace(self.objective, mesh=mesh))


def _updated(
    objective: Any,
    optimizer: Optimizer,
    num_micro_batches: int,
    learner: Learner[Array],
    *given: Any,
) -> tuple[Learner[Array], dict[str, Any]]:
    """`jrl.trainer.learner.update.update`, to which a network with adapters gives these away
    alone: what is beside them may belong to others too."""
    if objective.config.lora is None:
        return update(objective, optimizer, num_micro_batches, learner, *given)
    learned, fixed = split(learner.weights, objective.config)
    learner = replace(learner, weights=learned)
    learner, metrics = update(objective, optimizer, num_micro_batches, learner, *given, fixed)
    return replace(learner, weights=trees.joined(learner.weights, fixed)), metrics


class PoolSpec(NamedTuple):
    """The slots of an engine, as a part of the state of a run.

    Attributes:
      decoder: what they are decoded by.
      slots: rows.
      columns: tokens of a row.
    """

    decoder: Decoder
    slots: int
    columns: int


@dataclass(frozen=True)
class Networks:
    """All that a recipe trains.

    Attributes:
      policy: what samples.
      critic: what values states, None without one.
      keeps_reference: whether the policy at the start of training is kept; of a policy with
        adapters it is there without another copy.
      packs: whether updates run packed rows (`jrl.trainer.packed.plan`).
      max_staleness: versions of the policy that what it learns from may be behind it.
      pool_spec: of an engine whose rows in flight keep their keys and values, None where those
        are computed again.
      reward_parts: names of the parts that a verdict can have.
    """

    policy: Network[PolicyObjective]
    critic: Network[CriticObjective] | None
    keeps_reference: bool
    packs: bool = False
    max_staleness: int = 0
    pool_spec: PoolSpec | None = None
    reward_parts: tuple[str, ...] = ()

    @property
    def mesh(self) -> FoldedMesh:
        return self.policy.mesh

    @property
    def ahead_spec(self) -> AheadSpec | None:
        """For what is sampled ahead; None where nothing is."""
        if not self.max_staleness:
            return None
        policy = self.policy.objective
        return AheadSpec(
            policy.recipe,
            self.max_staleness,
            policy.layout.prompt_length,
            policy.response_length,
            policy.config if policy.recipe.router_replay == "R3" else None,
            self.reward_parts,
        )

    def with_adapters(self, lora: Lora | None) -> "Networks":
        """With a policy that has other adapters, or none."""
        objective = self.policy.objective
        objective = replace(objective, config=replace(objective.config, lora=lora))
        return replace(self, policy=replace(self.policy, objective=objective))

    def on(self, mesh: FoldedMesh) -> "Networks":
        """The same on another mesh."""
        critic = None if self.critic is None else self.critic.on(mesh)
        return replace(self, policy=self.policy.on(mesh), critic=critic)
