"""Scoring pass of a teacher and the policy together, for the divergence of their distributions."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.trainer.scoring import ArgmaxScorer, Read, Scorer
from moe import model
from moe.attention.context_parallel import context_of
from moe.config import Model, ModelConfig
from moe.distillation import divergence
from moe.router.statistics import RouterStatistics
from moe.weights import Transformer

Weights = tuple[Transformer[Array], Transformer[Array]]
"""Of the teacher and of the policy, which are on the same mesh."""


@dataclass(frozen=True)
class DivergenceScorer(ArgmaxScorer):
    """Scorer of a teacher whose passes also return ``KL(policy || teacher)`` of each token's
    distributions over the whole vocabulary. Their weights are `Weights`.

    Attributes:
      policy: network of the policy.
    """

    policy: ModelConfig = field(kw_only=True)

    fields = (*ArgmaxScorer.fields, "kl")

    @property
    def of_policy(self) -> Scorer:
        """Scorer of the policy over the same rows."""
        settings = {"sampling": self.sampling, "packed": self.packed}
        return Scorer(self.policy.for_any_routing(), self.mesh, self.layout, **settings)

    @property
    def weight_specs(self) -> Any:
        return super().weight_specs, self.of_policy.weight_specs

    def states(
        self, weights: Any, batch: Batch[Array]
    ) -> tuple[Any, RouterStatistics[Array] | None]:
        """Last hidden states of both networks; without router sums, as no buffer overflows."""
        pairs = zip((self, self.of_policy), weights, strict=True)
        runs = [
            model.run(network_weights, each.pack_with(batch, None), each.model)
            for each, network_weights in pairs
        ]
        return tuple(x for x, _ in runs), None

    def run(
        self,
        weights: Any,
        inputs: tuple[Array, Array, Array | None],
        read: Read,
        record_choices: bool = False,
    ) -> tuple[Any, RouterStatistics[Array] | None]:
        """As of a `Scorer`, without pipeline stages and recorded choices."""
        tokens, valid, _ = inputs
        batch = Batch(tokens, valid, valid)
        x, router = self.states(weights, batch)
        return read(weights, x, batch), router

    def outputs(self, weights: Any, x: Any, batch: Batch[Array]) -> tuple[Array, ...]:
        (teacher, policy), (teacher_x, policy_x) = weights, x
        scored = super().outputs(teacher, teacher_x, batch)
        teacher_x, _, _ = self.predicting_states(teacher_x, batch)
        policy_x, _, to_rows = self.of_policy.predicting_states(policy_x, batch)
        networks = policy, policy_x, teacher, teacher_x, self.of_policy.model, self.config
        kl = divergence(*networks, temperature=self.sampling.policy_temperature)
        return *scored, to_rows(kl)


def check_divergence(role: str, network: Model, policy: Model) -> None:
    """Raises ValueError if the two networks cannot run in one pass."""
    problem = None
    if network.mesh != policy.mesh:
        problem = "has a layout of its own: leave out --teacher-layout"
    elif policy.mesh.layout.pp > 1:
        problem = "runs on a pipeline: choose a layout without pp"
    elif policy.mesh.layout.cp > 1 and context_of(network) != context_of(policy):
        problem = f"orders rows by {context_of(network)} over cp: give --context"
    if problem is not None:
        raise ValueError(
            f"the divergence of the policy from the {role} is computed in one pass of both, and "
            f"the {role} {problem}, or take no baseline (--teacher-baseline none)."
        )
