"""Networks of a run by role, and the sizes of what else the state of the run holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jrl.recipes.base.batch import CRITIC
from jrl.recipes.base.recipe import POLICY, Recipe
from jrl.rollout.collection.async_collector import AsyncBufferSpec
from jrl.rollout.decoding.slots import Decoder
from jrl.trainer.learner.update import CriticObjective, Network, PolicyObjective
from jrl.trainer.scoring import Scorer
from moe.architecture.lora import Lora
from moe.config import Model, ModelConfig
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
class Frozen:
    """Network that scores completions and is never updated.

    Attributes:
      scorer: the network on its mesh.
      bins: packed rows of a micro-batch (`jrl.rollout.packing`).
      from_file: true if its weights come from a file, and so are not in checkpoints; false for the
        policy that training started from.
    """

    scorer: Scorer
    bins: int = 1
    from_file: bool = False

    @property
    def config(self) -> ModelConfig:
        return self.scorer.config

    @property
    def mesh(self) -> FoldedMesh:
        return self.scorer.mesh

    @property
    def model(self) -> Model:
        return self.scorer.model


@dataclass(frozen=True)
class Networks:
    """Networks of a run.

    Attributes:
      trained: networks with an optimizer: the policy, and the critic if there is one.
      frozen: networks that score completions and are not updated.
      packs: true if updates run packed rows (`jrl.rollout.packing`).
      ahead_spec: sizes of the buffer of asynchronous rollouts; None without these.
      pool_spec: of an engine whose rows in flight keep their KV cache, None where that is
        recomputed.
    """

    trained: Mapping[str, Network[Any]]
    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    packs: bool = False
    ahead_spec: AsyncBufferSpec | None = None
    pool_spec: PoolSpec | None = None

    @property
    def policy(self) -> Network[PolicyObjective]:
        return self.trained[POLICY]

    @property
    def critic(self) -> Network[CriticObjective] | None:
        return self.trained.get(CRITIC)

    @property
    def recipe(self) -> Recipe:
        return self.policy.objective.recipe

    @property
    def mesh(self) -> FoldedMesh:
        return self.policy.mesh

    @property
    def copied(self) -> dict[str, Frozen]:
        """Frozen copies of the policy that are in the state and in checkpoints. For a policy with
        adapters there are none: its base weights are that copy."""
        if self.policy.config.lora is not None:
            return {}
        return {role: each for role, each in self.frozen.items() if not each.from_file}

    def with_adapters(self, lora: Lora | None) -> "Networks":
        """Copy whose policy has other adapters, or none."""
        objective = self.policy.objective
        objective = replace(objective, config=replace(objective.config, lora=lora))
        policy = replace(self.policy, objective=objective)
        return replace(self, trained={**self.trained, POLICY: policy})
