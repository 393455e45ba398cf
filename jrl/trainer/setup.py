"""The fixed parts of a run, made from its configuration: task, tokeniser, network, mesh,
decoders."""

import difflib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.config.files import fixed_settings
from jrl.config.run import ROUTER_SETTINGS, RunConfig
from jrl.processes.agreement import several
from jrl.recipes.actor_critic import ActorCritic
from jrl.recipes.recipe import MICRO_BATCH, Recipe, near_divisors
from jrl.rollout.generate import Decoder
from jrl.rollout.resharding import RolloutPolicy, rollout_mesh
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.rollout.scoring import Rows
from jrl.tasks import Task, load_task
from jrl.tasks.jsonl import Fields
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import (
    NONE,
    OF_CHECKPOINT,
    PromptFormat,
    prompt_format,
    with_template,
)
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.learner import Optimiser
from jrl.trainer.lengths import prompt_length, response_length
from jrl.trainer.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from moe.config import PRESETS, ModelConfig
from moe.model import check_window
from moe.router.capacity import can_drop
from moe.tokens.zigzag import ZigzagLayout
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
      mesh: where everything lives but what samples completions, which is on `rollout_mesh`.
      prompt_length: tokens that prompts are padded to.
      response_length: limit of a completion in tokens, end-of-sequence included.

    Raises:
      ValueError: for a network whose experts drop choices, see `moe.router.capacity`.
    """

    run: RunConfig
    recipe: Recipe
    task: Task
    tokenizer: Tokenizer
    model: ModelConfig
    mesh: FoldedMesh
    prompt_length: int
    response_length: int

    def __post_init__(self):
        if can_drop(self.model):
            raise ValueError(
                f"capacity_factor={self.model.capacity_factor} drops choices of experts where the "
                "policy is scored and none where it samples, so that importance ratios differ from "
                "1 before any update: set it to None, or to num_experts / experts_per_token = "
                f"{self.model.num_experts / self.model.experts_per_token:g} or more."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Those that a run keeps to its end, as JSON values."""
        return fixed_settings(self.run, self.recipe)

    @cached_property
    def format(self) -> PromptFormat:
        """How prompts become tokens."""
        return prompt_format(self.run, self.tokenizer)

    @property
    def sampling(self) -> Sampling:
        recipe = self.recipe
        return Sampling(recipe.temperature, recipe.top_k, recipe.top_p)

    @cached_property
    def rollout_mesh(self) -> FoldedMesh:
        """Where completions are sampled: `mesh` itself unless that cannot decode or the run has a
        rollout layout."""
        return rollout_mesh(self.run.rollout_layout, self.mesh)

    @cached_property
    def rollout_policy(self) -> RolloutPolicy:
        """The policy on `rollout_mesh`."""
        return RolloutPolicy(self.model, self.mesh, self.rollout_mesh)

    def decoder(self, sampling: Sampling, copies: int) -> Decoder:
        """Decoding with these settings."""
        return Decoder(
            config=self.model,
            mesh=self.rollout_mesh,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            copies=copies,
            pad_id=self.tokenizer.pad_id,
            stop_ids=self.tokenizer.stop_ids,
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
        return self.recipe.rows_per_update // self.recipe.piece

    @property
    def warm_start_rows(self) -> int:
        """Rows of a supervised batch: `warm_start_batch`, and as many that do not count as it takes
        to divide over the devices."""
        mesh = self.mesh
        unit = math.lcm(self.rollout_ranks, mesh.size(mesh.dp))
        rows = -(-self.run.warm_start_batch // unit) * unit
        # In tokens they do at the latest where the rows of a rank do.
        while not self._divides_in_tokens(rows // mesh.size(mesh.dp)):
            rows += unit
        return rows

    def _divides_in_tokens(self, rows: int) -> bool:
        """Whether rows of a data-parallel rank divide over cp x tp, prompts and responses each."""
        mesh = self.mesh
        cp, ranks = mesh.size(mesh.cp), mesh.size(mesh.sequence)
        lengths = self.prompt_length, self.response_length
        return all(ZigzagLayout(((rows, time),), cp).num_tokens % ranks == 0 for time in lengths)

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
    def over_rollout_rows(self) -> NamedSharding:
        """The same while completions are sampled."""
        return NamedSharding(self.rollout_mesh.mesh, PartitionSpec(self.rollout_mesh.dp))

    @property
    def rollout_ranks(self) -> int:
        """Ranks that share the rows to decode, which must divide over them."""
        mesh = self.rollout_mesh
        return mesh.size((*mesh.dp, *mesh.tp))

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
    if several() and len(devices) > layout.num_devices:
        raise ValueError(
            f"layout {run.layout!r} takes {layout.num_devices} devices, and the processes of the "
            f"run have {len(devices)}: each must have its part, so choose a layout of all."
        )
    if run.checkpoint is not None and model is None:
        model = _of_checkpoint(run.checkpoint)
    elif run.checkpoint is None and run.model not in PRESETS:
        near = difflib.get_close_matches(run.model, PRESETS) or list(PRESETS)
        raise ValueError(f"model={run.model!r} is no preset; near: {', '.join(near)}.")
    task = load_task(run.task, run.seed, _fields(run), run.verifiers)
    try:
        if tokenizer is None:
            tokenizer = _tokenizer(run, task, model)
        network = _trained(
            PRESETS[run.model](tokenizer.vocab_size) if model is None else model, run
        )
        format = prompt_format(run, tokenizer)
        prompt = prompt_length(run, task, format)
        setup = Setup(
            run=run,
            recipe=recipe,
            task=task,
            tokenizer=tokenizer,
            model=network,
            mesh=fold(layout, devices[: layout.num_devices]),
            prompt_length=prompt,
            response_length=response_length(run, task, tokenizer, network, prompt),
        )
        setup = _with_micro_batch(setup)
        _check_divides(setup)
        _check_fits(setup)
    except BaseException:
        task.close()
        raise
    return setup


def _fields(run: RunConfig) -> Fields:
    return Fields(run.prompt_field, run.answer_field, run.messages_field)


def _tokenizer(run: RunConfig, task: Task, model: ModelConfig | None) -> Tokenizer:
    """The tokenizer of a new run.

    Args:
      model: of a checkpoint, None for a preset.
    """
    if run.tokenizer is not None:
        size = None if model is None else model.vocab_size
        return with_template(run, load_tokenizer(run.tokenizer, size))
    if run.checkpoint is not None and model is not None:
        from jrl.text.json_tokenizer import checkpoint_tokenizer  # needs an extra

        return with_template(run, checkpoint_tokenizer(run.checkpoint, model.vocab_size))
    if run.chat_template not in (OF_CHECKPOINT, NONE):
        raise ValueError(
            f"chat_template={run.chat_template!r} needs a tokenizer that its special tokens are "
            "in: give --tokenizer or a checkpoint as --model."
        )
    return Tokenizer.train_characters(task.characters)


def _trained(model: ModelConfig, run: RunConfig) -> ModelConfig:
    """The network, computed and its routers balanced as the run says."""
    given = {name: getattr(run, name) for name in ROUTER_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        needs = "selection_bias" if name == "bias_update_rate" else "num_experts"
        if value and not getattr(model, needs):
            raise ValueError(
                f"{name}={value} changes nothing: the network of {run.model} has no "
                f"{'selection bias' if needs == 'selection_bias' else 'experts'}. Leave out "
                f"--{name.replace('_', '-')}."
            )
    execution = replace(model.execution, remat=run.remat, fsdp=run.fsdp)
    return replace(model, **given, execution=execution)


def _of_checkpoint(directory: str) -> ModelConfig:
    if find_spec("safetensors") is None or find_spec("tokenizers") is None:
        raise ValueError(
            f"model=hf:{directory} needs safetensors and tokenizers, of which one is not "
            'installed: run pip install -e ".[hf]"'
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
    if setup.tokenizer.vocab_size < setup.model.vocab_size:
        raise ValueError(
            f"the model has {setup.model.vocab_size} ids, which it may all sample, and the "
            f"tokenizer only {setup.tokenizer.vocab_size}: take the tokenizer of the checkpoint, "
            "or its tokenizer.json, which may have fewer tokens."
        )
    check_window(setup.prompt_length + setup.response_length, setup.model)


def _with_micro_batch(setup: Setup) -> Setup:
    """With a micro-batch that divides over the devices, where the recipe leaves the choice and
    there is one."""
    if setup.recipe.micro_batch is not None:
        return setup
    for size in near_divisors(setup.recipe.rows_per_update, MICRO_BATCH):
        chosen = replace(setup, recipe=replace(setup.recipe, micro_batch=size))
        try:
            _check_training_divides(chosen)
        except ValueError:
            continue
        return chosen
    return setup


def _check_divides(setup: Setup) -> None:
    """Batches must divide over the devices, and micro-batches with them, in rows and in tokens."""
    _check_rollout_divides(setup)
    _check_training_divides(setup)


def _check_training_divides(setup: Setup) -> None:
    recipe, mesh, layout = setup.recipe, setup.mesh, f"layout {setup.run.layout!r}"
    dp = mesh.size(mesh.dp)
    sizes = {"mini_batch": recipe.rows_per_update, "micro_batch": recipe.piece}
    _check_rows(sizes, dp, f"dp={dp} of {layout}")
    piece, share = recipe.piece // dp, setup.rows.copies
    tokens = {
        "the prompts of a micro_batch": (piece // share, setup.prompt_length),
        "the responses of a micro_batch": (piece, setup.response_length),
    }
    _check_tokens(setup, tokens, mesh)


def _check_rollout_divides(setup: Setup) -> None:
    recipe, mesh = setup.recipe, setup.rollout_mesh
    own = setup.run.rollout_layout or str(mesh.layout)
    same = mesh == setup.mesh
    layout = f"layout {setup.run.layout!r}" if same else f"rollout layout {own!r}"
    dp, ranks = mesh.size(mesh.dp), setup.rollout_ranks
    # Supervised and held-out batches need not divide: they are filled up.
    _check_rows({"prompts": recipe.prompts}, dp, f"dp={dp} of {layout}")
    rows = {"prompts x group_size": recipe.completions}
    _check_rows(rows, ranks, f"dp x tp = {ranks} of {layout}")
    tokens = {"the prompts of a step": (recipe.prompts // dp, setup.prompt_length)}
    _check_tokens(setup, tokens, mesh)


def _check_rows(rows: dict[str, int], ranks: int, over: str) -> None:
    for name, number in rows.items():
        if number % ranks:
            raise ValueError(
                f"{name}={number} does not divide over {over}: choose a multiple of {ranks}, or "
                "another --layout or --rollout-layout."
            )


def _check_tokens(setup: Setup, sections: dict[str, tuple[int, int]], mesh: FoldedMesh) -> None:
    """Sections of a stream, each the rows on a data-parallel rank and their length, must be cut
    into equal parts. The padding that context parallelism adds counts."""
    cp, ranks = mesh.size(mesh.cp), mesh.size(mesh.sequence)
    for name, section in sections.items():
        number = ZigzagLayout((section,), cp).num_tokens
        if number % ranks:
            raise ValueError(
                f"{name} have {number} tokens per data-parallel rank, which do not divide over "
                f"cp x tp = {ranks}: choose prompts and micro_batch, or "
                f"prompt_length={setup.prompt_length} and response_length="
                f"{setup.response_length}, in multiples of {ranks}."
            )
