"""The fixed parts of a run, made from its configuration: task, tokeniser, network, mesh,
decoders."""

import difflib
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.recipes.actor_critic import ActorCritic
from jrl.recipes.recipe import Recipe
from jrl.rollout.generate import Decoder
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.rollout.scoring import Rows
from jrl.tasks import Task, load_task
from jrl.tokenizer import Tokenizer
from jrl.trainer.config import RunConfig
from jrl.trainer.learner import Optimiser
from jrl.trainer.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from moe.config import PRESETS, ModelConfig
from moe.model import check_window
from sharding.folding import FoldedMesh, Layout, fold


@dataclass(frozen=True)
class Setup:
    """What does not change during a run.

    Attributes:
      run: its configuration.
      recipe: its algorithm.
      task: prompts and verifier.
      tokenizer: between text and tokens.
      model: the policy network.
      mesh: where everything lives.
      prompt_length: tokens that prompts are padded to.
      response_length: limit of a completion in tokens, end-of-sequence included.
    """

    run: RunConfig
    recipe: Recipe
    task: Task
    tokenizer: Tokenizer
    model: ModelConfig
    mesh: FoldedMesh
    prompt_length: int
    response_length: int

    @property
    def sampling(self) -> Sampling:
        recipe = self.recipe
        return Sampling(recipe.temperature, recipe.top_k, recipe.top_p)

    def decoder(self, sampling: Sampling, copies: int) -> Decoder:
        """Decoding with these settings."""
        return Decoder(
            config=self.model,
            mesh=self.mesh,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            copies=copies,
            pad_id=self.tokenizer.pad_id,
            eos_id=self.tokenizer.eos_id,
            sampling=sampling,
        )

    @cached_property
    def training_decoder(self) -> Decoder:
        return self.decoder(self.sampling, self.recipe.group_size)

    @cached_property
    def sampled_decoder(self) -> Decoder:
        """Evaluation as in training: one completion per prompt at the same sampling settings."""
        return self.decoder(self.sampling, 1)

    @cached_property
    def greedy_decoder(self) -> Decoder:
        return self.decoder(GREEDY, 1)

    @cached_property
    def policy_objective(self) -> PolicyObjective:
        return PolicyObjective(self.model, self.mesh, self.rows, self.recipe, self.sampling)

    @cached_property
    def critic_objective(self) -> CriticObjective:
        if not isinstance(self.recipe, ActorCritic):
            raise ValueError(f"{type(self.recipe).__name__} trains no critic.")
        return CriticObjective(self.model.as_critic(), self.mesh, self.rows, self.recipe)

    @cached_property
    def supervised_objective(self) -> SupervisedObjective:
        return SupervisedObjective(self.model, self.mesh, Rows(self.prompt_length, copies=1))

    @property
    def policy_optimiser(self) -> Optimiser:
        recipe = self.recipe
        return Optimiser(
            recipe.learning_rate,
            recipe.learning_rate_warmup,
            recipe.weight_decay,
            recipe.max_grad_norm,
        )

    @property
    def critic_optimiser(self) -> Optimiser:
        recipe = self.critic_objective.recipe
        return Optimiser(recipe.critic_learning_rate, 0, recipe.weight_decay, recipe.max_grad_norm)

    @property
    def warm_start_optimiser(self) -> Optimiser:
        return Optimiser(self.run.warm_start_learning_rate)

    @property
    def num_micro(self) -> int:
        """Pieces of a mini-batch on each device."""
        return self.recipe.mini_batch // self.recipe.piece

    @property
    def rows(self) -> Rows:
        """Completions of a prompt share it in a forward pass if every device gets whole groups."""
        group, dp = self.recipe.group_size, self.mesh.size(self.mesh.dp)
        return Rows(self.prompt_length, 1 if self.recipe.piece // dp % group else group)

    @property
    def over_rows(self) -> NamedSharding:
        """Where arrays with a row per sequence live."""
        return NamedSharding(self.mesh.mesh, PartitionSpec(self.mesh.dp))

    @property
    def whole(self) -> NamedSharding:
        """Where arrays live that every device holds."""
        return NamedSharding(self.mesh.mesh, PartitionSpec())

    def key(self, stream: str, step: int, round: int = 0) -> jax.Array:
        """Randomness for one purpose at one step; no two purposes share any."""
        number = ["weights", "critic", "rollout", "evaluation", "warm start"].index(stream)
        key = jax.random.key(self.run.seed)
        for part in (number, step, round):
            key = jax.random.fold_in(key, part)
        return key

    def shuffler(self, step: int, epoch: int) -> np.random.Generator:
        """Randomness of the order of rows."""
        return np.random.default_rng([self.run.seed, step, epoch])


def set_up(
    run: RunConfig,
    recipe: Recipe,
    tokenizer: Tokenizer | None = None,
    model: ModelConfig | None = None,
) -> Setup:
    """Makes the fixed parts of a run. Starts a task's worker processes: close the task at the end.

    Args:
      tokenizer: of a run that is being resumed or evaluated; None makes it as configured.
      model: the same, for a run that began from a public checkpoint.

    Raises:
      ValueError: on anything in the configuration that cannot be had.
    """
    layout = Layout.parse(run.layout)
    devices = jax.devices()
    if len(devices) < layout.num_devices:
        raise ValueError(
            f"layout {run.layout!r} needs {layout.num_devices} devices and there are "
            f"{len(devices)}: choose another layout, or --devices {layout.num_devices} "
            "to make believe on a CPU."
        )
    if run.checkpoint is not None and model is None:
        model = _of_checkpoint(run.checkpoint)
    elif run.checkpoint is None and run.model not in PRESETS:
        near = difflib.get_close_matches(run.model, PRESETS) or list(PRESETS)
        raise ValueError(f"model={run.model!r} is no preset; near: {', '.join(near)}.")
    task = load_task(run.task, run.seed)
    try:
        if tokenizer is None and run.tokenizer is not None:
            tokenizer = Tokenizer.from_file(run.tokenizer)
        elif tokenizer is None and run.checkpoint is not None and model is not None:
            from jrl.json_tokenizer import checkpoint_tokenizer  # needs an extra

            tokenizer = checkpoint_tokenizer(run.checkpoint, model.vocab_size)
        elif tokenizer is None:
            tokenizer = Tokenizer.train_characters(task.characters)
        prompt_length, answer_length = _lengths(task, tokenizer)
        setup = Setup(
            run=run,
            recipe=recipe,
            task=task,
            tokenizer=tokenizer,
            model=_executed(
                PRESETS[run.model](tokenizer.vocab_size) if model is None else model, run
            ),
            mesh=fold(layout, devices[: layout.num_devices]),
            prompt_length=_at_least(run.prompt_length, prompt_length, "prompt_length"),
            response_length=(
                -(-5 * answer_length // 4)
                if run.response_length is None
                else _at_least(run.response_length, 1, "response_length")
            ),
        )
        _check_divides(setup)
        _check_fits(setup)
    except BaseException:
        task.close()
        raise
    return setup


def _executed(model: ModelConfig, run: RunConfig) -> ModelConfig:
    """The network, computed as the run says."""
    return replace(model, execution=replace(model.execution, remat=run.remat))


def _of_checkpoint(directory: str) -> ModelConfig:
    if find_spec("safetensors") is None or find_spec("tokenizers") is None:
        raise ValueError(
            f"model=hf:{directory} needs safetensors and tokenizers, of which one is not "
            'installed: run pip install "jrl[hf]"'
        )
    from moe.huggingface import config_from  # needs an extra

    return config_from(directory)


def _check_fits(setup: Setup) -> None:
    """The network must have every id of the tokenizer, and look back over a whole sequence."""
    if setup.tokenizer.vocab_size > setup.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {setup.tokenizer.vocab_size} ids and the model only "
            f"{setup.model.vocab_size}: take the tokenizer of the checkpoint."
        )
    check_window(setup.prompt_length + setup.response_length, setup.model)


def _lengths(task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest answer, start and end tokens included.

    A token covers one character or more, so the task's bounds in characters hold.
    """
    return task.max_prompt_length + 1, task.max_response_length + 1


def _at_least(given: int | None, needed: int, name: str) -> int:
    if given is None:
        return needed
    if given < needed:
        raise ValueError(f"{name}={given} is too short: the task needs {needed} tokens.")
    return given


def _check_divides(setup: Setup) -> None:
    """Batches must divide over the devices, and micro-batches with them, in rows and in tokens."""
    recipe, mesh = setup.recipe, setup.mesh
    dp, tp = mesh.size(mesh.dp), mesh.size(mesh.tp)
    if mesh.layout.cp > 1:
        raise ValueError(
            f"layout {setup.run.layout!r}: rollouts run without context parallelism; cp must be 1."
        )
    rows = {
        "prompts": recipe.prompts,
        "mini_batch": recipe.mini_batch,
        "micro_batch": recipe.piece,
        "warm_start_batch": setup.run.warm_start_batch,
        "eval_prompts": setup.run.eval_prompts,
    }
    for name, number in rows.items():
        if number % dp:
            raise ValueError(
                f"{name}={number} does not divide over dp={dp} of layout {setup.run.layout!r}: "
                f"choose a multiple of {dp}."
            )
    share = setup.rows.copies
    decoded = {
        "prompts x group_size": recipe.completions,
        "warm_start_batch": setup.run.warm_start_batch,
        "eval_prompts": setup.run.eval_prompts,
    }
    for name, number in decoded.items():
        if number // dp % tp:
            raise ValueError(
                f"{name}={number} does not divide over dp x tp = {dp * tp} of layout "
                f"{setup.run.layout!r}: choose a multiple of {dp * tp}."
            )
    pieces = recipe.piece // dp
    tokens = {
        "the prompts of a step": recipe.prompts // dp * setup.prompt_length,
        "the prompts of a micro_batch": pieces // share * setup.prompt_length,
        "the responses of a micro_batch": pieces * setup.response_length,
    }
    for name, number in tokens.items():
        if number % tp:
            raise ValueError(
                f"{name} have {number} tokens per data-parallel rank, which do not divide over "
                f"tp={tp}: choose prompts and micro_batch, or prompt_length="
                f"{setup.prompt_length} and response_length={setup.response_length}, in multiples "
                f"of {tp}."
            )
