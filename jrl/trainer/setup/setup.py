"""Setup of a run: its constant parts, made from its configuration, for example task, tokenizer,
network and mesh."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jrl.config.files import fixed_settings
from jrl.config.run import RunConfig
from jrl.processes.agreement import is_multiprocess
from jrl.published.location import download_command
from jrl.published.network import open_checkpoint
from jrl.recipes import Sft
from jrl.recipes.base.batch import CRITIC
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import POLICY, NetworkSpec, Recipe
from jrl.rollout.collection.async_collector import AsyncBufferSpec
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.conversation_engine import ConversationEngine
from jrl.rollout.decoding.build import build_engine
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.expert_balancer import first_placement
from jrl.rollout.decoding.protocol import RolloutEngine
from jrl.rollout.decoding.scheduling.sizes import ROLLOUTS
from jrl.rollout.decoding.split_backend import DeviceSplit
from jrl.rollout.resharding import rollout_mesh, separate_rollout_mesh, split_mesh
from jrl.rollout.sampler import Sampler
from jrl.rollout.sampling import Sampling
from jrl.tasks import Task, load_task
from jrl.tasks.data.chats import Chats, load_chats
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.fingerprint import data_fingerprints
from jrl.tasks.data.split import parse_heldout
from jrl.tasks.mixture import Mixture, has_environments, part_names
from jrl.tasks.sandbox.sandbox import allow_unsafe
from jrl.text.load import load_tokenizer
from jrl.text.loss_mask import ChatFormat
from jrl.text.prompt_format import (
    CHECKPOINT_TEMPLATE,
    NO_TEMPLATE,
    PromptFormat,
    prompt_format,
    with_template,
)
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.evaluation.network_files import (
    NetworkFile,
    check_networks,
    open_network,
    starts_from,
)
from jrl.trainer.learner.networks import Frozen, Networks, PoolSpec
from jrl.trainer.learner.teacher import DivergenceScorer, check_divergence
from jrl.trainer.learner.update import CriticObjective, Network, PolicyObjective
from jrl.trainer.scoring import ArgmaxScorer, PromptLayout, Scorer
from jrl.trainer.setup.chat_rows import ChatRows, chat_rows, sampled_lengths
from jrl.trainer.setup.geometry import Geometry
from jrl.trainer.setup.lengths import check_answers, fit_prompts, response_length
from jrl.trainer.setup.network import (
    check_dispatchers,
    check_overlaps,
    check_shardable,
    check_supported,
    first_devices,
    frozen_network_of,
    network_of,
    with_dispatch,
)
from jrl.trainer.state import Randomness
from moe.architecture.feed_forward import can_drop
from moe.config import PRESETS, Model, ModelConfig, preset
from moe.disaggregated.split import SplitMesh, devices_of
from moe.disaggregated.weights import check_splits
from sharding.folding import FoldedMesh, Layout, fold

MIN_PREFILL_PROMPTS = 64
"""Minimum number of prompts of a prefill if that many are requested: with fewer, dispatching a
prefill takes longer than running it."""


@dataclass(frozen=True)
class Setup:
    """Constant parts of a run.

    Attributes:
      run: its configuration.
      recipe: its algorithm.
      task: prompts and verifier.
      tokenizer: between text and tokens.
      model: the policy network.
      mesh: the training mesh; completions are sampled on `rollout_mesh`.
      prompt_length: tokens that prompts are padded to.
      response_length: limit of a completion in tokens, end-of-sequence included.
      prompts_dropped: prompts that were left out for their length.
      rows: the training conversations of a supervised recipe; the two lengths then limit
        completions that are sampled for display.

    Raises:
      ValueError: for a network whose experts drop tokens, see `moe.router.layer`, and for router
        replay in a network without experts.
    """

    run: RunConfig
    recipe: Recipe
    task: Task
    tokenizer: Tokenizer
    model: ModelConfig
    mesh: FoldedMesh
    prompt_length: int
    response_length: int
    prompts_dropped: int = 0
    rows: ChatRows | None = None

    def __post_init__(self):
        # Without reinforcement learning steps there is no ratio.
        if can_drop(self.model) and self.run.steps and not self.recipe.supervised:
            raise ValueError(
                f"capacity_factor={self.model.capacity_factor} drops tokens when the policy "
                "scores completions and none when it samples them, so that importance ratios "
                "differ from 1 before any update: leave it out, or make it num_experts / "
                f"experts_per_token = {self.model.num_experts / self.model.experts_per_token:g} "
                "or more; only supervised learning (steps=0) may drop tokens."
            )
        if self.recipe.router_replay is not None and not self.model.num_experts:
            raise ValueError(
                f"router_replay={self.recipe.router_replay!r} has nothing to replay: the network "
                f"of {self.run.model} has no experts. Leave out --router-replay."
            )
        if self.run.max_staleness:
            _check_may_be_stale(self.recipe, self.run.max_staleness)
        if has_environments(self.task):
            _check_may_converse(self.run, self.recipe)
        else:
            for name in ("max_turns", "turn_length"):
                if getattr(self.run, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self.run, name)} bounds the turns of conversations, and "
                        f"task={self.run.task} has none: leave it out."
                    )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a run may not change, as JSON values."""
        return fixed_settings(self.run, self.recipe)

    @cached_property
    def data(self) -> dict[str, dict[str, Any]]:
        """Fingerprints of the records of the task, by the name of each list."""
        return data_fingerprints(self.task)

    @property
    def format(self) -> PromptFormat:
        """Encoding of prompts to tokens."""
        return _format(self.run, self.recipe, self.tokenizer)

    @property
    def randomness(self) -> Randomness:
        return Randomness(self.run.seed)

    @cached_property
    def split(self) -> SplitMesh | None:
        """Device groups of attention and experts for disaggregated sampling; None on one mesh."""
        run = self.run
        if run.rollout_split is None:
            return None
        return split_mesh(run.rollout_split, run.rollout_devices, self.mesh)

    @cached_property
    def rollout_mesh(self) -> FoldedMesh:
        """Mesh of sampling: `mesh` itself unless that cannot decode or the run has a rollout layout
        or rollout devices. With disaggregation the mesh of attention, which holds the rows."""
        if self.split is not None:
            return self.split.attention
        text, num_devices = self.run.rollout_layout, self.run.rollout_devices
        if num_devices is not None:
            return separate_rollout_mesh(text, num_devices, self.mesh)
        return rollout_mesh(text, self.mesh)

    @property
    def geometry(self) -> Geometry:
        """Geometry of batches on the devices."""
        run, rows, micro_batches = self.run, self.rows, 1
        layout = rollout = f"layout {run.layout!r}"
        if self.split is not None:
            micro_batches = run.rollout_micro_batches
            rollout = f"rollout split {run.rollout_split!r}"
        elif self.rollout_mesh != self.mesh:
            rollout = f"rollout layout {run.rollout_layout or str(self.rollout_mesh.layout)!r}"
        return Geometry(
            self.recipe,
            prompt_length=self.prompt_length if rows is None else rows.before,
            response_length=self.response_length if rows is None else rows.after,
            mesh=self.mesh,
            rollout_mesh=self.rollout_mesh,
            layout=layout,
            rollout_layout=rollout,
            rollout_micro_batches=micro_batches,
        )

    def sampler(self, seed: int | None = None) -> Sampler:
        """Creates a sampler of the task's completions, without weights; a seed of None is the
        run's."""
        engine: RolloutEngine = self._engine(self.run.seed if seed is None else seed)
        if has_environments(self.task):
            engine = ConversationEngine(
                engine, self.task, self.format, self.run.max_turns, self.run.turn_length
            )
        return Sampler(engine, self.task, self.format, self.prompt_length, self.response_length)

    def _engine(self, seed: int) -> Engine:
        run, devices = self.run, self.rollout_mesh
        policy = replace(ROLLOUTS, prefill_tokens=run.prefill_tokens)
        if self.split is None:
            # Evaluations and the checks of the warm start share the compiled prefill of a step.
            policy = replace(policy, prefill_prompts=max(self.recipe.prompts, MIN_PREFILL_PROMPTS))
        else:
            devices = DeviceSplit(
                self.split,
                run.rollout_micro_batches,
                run.rollout_expert_slots,
                run.rollout_replan,
                run.rollout_m2n,
            )
        return build_engine(
            self.model,
            self.tokenizer,
            self.mesh,
            devices,
            slots=self.geometry.slots(run.slots),
            max_length=self.prompt_length + self.response_length,
            key=Randomness(seed).key("rollout"),
            policy=policy,
            records_choices=self.recipe.router_replay == "R3",
        )

    @property
    def named_files(self) -> dict[str, NetworkFile]:
        """Files that the recipe names for its networks, by role."""
        return {
            role: open_network(role, spec, self.tokenizer)
            for role, spec in self.recipe.networks.items()
            if spec.weights != POLICY
        }

    @property
    def network_files(self) -> dict[str, NetworkFile]:
        """Files of networks that do not begin as the policy, by role."""
        return {
            role: file
            for role, file in self.named_files.items()
            if not self._is_base(self.recipe.networks[role], file)
        }

    def _is_base(self, spec: NetworkSpec, file: NetworkFile) -> bool:
        """True if the policy keeps the weights of a network file as the base of its adapters."""
        is_as_base = not spec.trained and spec.layout is None and spec.dtype is None
        return self.model.lora is not None and is_as_base and starts_from(self.run, file)

    @property
    def critic(self) -> ModelConfig | None:
        """The critic network, by default the policy's with a value head; None without a critic."""
        if not self.recipe.uses_critic:
            return None
        if (file := self.network_files.get(CRITIC)) is None:
            return self.model.as_critic()
        return frozen_network_of(file.model, self.run, self.mesh).as_critic()

    @cached_property
    def frozen(self) -> dict[str, Frozen]:
        """Frozen networks by role."""
        specs = self.recipe.networks.items()
        return {role: self._frozen(role, spec) for role, spec in specs if not spec.trained}

    def _frozen(self, role: str, spec: NetworkSpec) -> Frozen:
        geometry, file = self.geometry, self.network_files.get(role)
        config = self.model.without_adapters()
        if spec.layout is not None:
            layout, size = Layout.parse(spec.layout), self.mesh.layout.num_devices
            if layout.num_devices != size:
                raise ValueError(
                    f"layout={spec.layout!r} of the {role} has {layout.num_devices} devices, and "
                    f"the policy {size}: choose a layout of as many."
                )
            mesh = fold(layout, devices_of(self.mesh))
            geometry = replace(geometry, mesh=mesh, layout=f"layout {spec.layout!r} of the {role}")
            geometry.check()
        if file is not None:
            run = self.run if spec.dtype is None else replace(self.run, dtype=spec.dtype)
            config = frozen_network_of(file.model, run, geometry.mesh)
            length = self.prompt_length + self.response_length
            if config.max_positions is not None and config.max_positions < length:
                raise ValueError(
                    f"the {role} in {file.path} has {config.max_positions} positions, and prompt "
                    f"and response may have {length} tokens: lower --response-length, or choose "
                    "another network."
                )
        # Of the whole policy at its temperature, whatever the sampler leaves out.
        sampling = Sampling(sampling_of(self.recipe).policy_temperature)
        passed = config, geometry.mesh, geometry.prompt_layout
        if spec.outputs == "kl":
            check_divergence(role, Model(config, geometry.mesh), Model(self.model, self.mesh))
            scorer = DivergenceScorer(*passed, sampling=sampling, policy=self.model)
            scorer = scorer.for_any_routing()  # of both networks in one pass
        else:
            kind = ArgmaxScorer if spec.outputs == "argmax" else Scorer
            scorer = kind(*passed, sampling=sampling)
        return Frozen(scorer, geometry.bins, from_file=file is not None)

    @property
    def trained(self) -> dict[str, Any]:
        """Trained networks by role, with their objectives and optimizers."""
        recipe, geometry, response = self.recipe, self.geometry, self.response_length
        layout, sizes = geometry.prompt_layout, (geometry.num_micro_batches, geometry.bins)
        policy = PolicyObjective(
            self.model, self.mesh, layout, recipe, response, sampling=sampling_of(recipe)
        )
        trained: dict[str, Any] = {POLICY: Network(policy, self.policy_optimizer, *sizes)}
        if (critic := self.critic) is not None:
            objective = CriticObjective(critic, self.mesh, layout, recipe, response)
            trained[CRITIC] = Network(objective, self.critic_optimizer, *sizes)
        return trained

    @property
    def networks(self) -> Networks:
        """Networks by role."""
        recipe, packs = self.recipe, self.run.packing
        if packs is None:
            # With windows, most tokens of a step only provide context; most conversations are far
            # shorter than the longest.
            is_sparse = not recipe.has_complete_groups or recipe.supervised
            packs = is_sparse and self.mesh.layout.pp == 1
        ahead = pool = None
        if self.run.max_staleness:
            ahead = AsyncBufferSpec(
                recipe,
                self.run.max_staleness,
                self.geometry.prompt_layout.prompt_length,
                self.response_length,
                self.model if recipe.router_replay == "R3" else None,
                part_names(self.task),
            )
        if self.run.stale_cache:
            # For its sizes only: an engine allocates its pool when rows come.
            engine = self._engine(self.run.seed)
            pool = PoolSpec(engine.decoder, engine.slots, engine.max_length)
        return Networks(self.trained, self.frozen, packs, ahead, pool)

    @property
    def imitator(self) -> Network[PolicyObjective]:
        """The policy in its warm start, which trains it by the recipe `sft` on reference
        completions."""
        # Adapters are added after the warm start.
        model = self.model.without_adapters()
        # Rows of different prompts, which share nothing.
        layout = PromptLayout(self.prompt_length, group_size=1)
        objective = PolicyObjective(model, self.mesh, layout, Sft(), self.response_length)
        # The recipe's optimizer at another rate, without what is chosen for its own steps.
        plain = Optimizer(self.run.warm_start_learning_rate)
        optimizer = replace(
            self.recipe.policy_optimizer,
            learning_rate=plain.learning_rate,
            warmup=plain.warmup,
            weight_decay=plain.weight_decay,
            max_grad_norm=plain.max_grad_norm,
            schedule=plain.schedule,
        )
        return Network(objective, self._with_run_settings(optimizer, 0), 1)

    @property
    def policy_optimizer(self) -> Optimizer:
        """Optimizer of the policy in this run."""
        steps = self.run.steps - min(self.recipe.value_pretraining_steps, self.run.steps)
        return self._with_run_settings(self.recipe.policy_optimizer, steps)

    @property
    def critic_optimizer(self) -> Optimizer:
        """Optimizer of the critic in this run."""
        return self._with_run_settings(self.recipe.critic_optimizer, self.run.steps)

    def _with_run_settings(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """Optimizer of the recipe with the run's dtypes of moments and gradient communication.

        Args:
          steps: training steps in which it is used.
        """
        run = self.run
        # Of a rate that falls only: others need not compile again if the run is prolonged.
        if optimizer.schedule != "constant":
            optimizer = replace(optimizer, steps=steps * self.recipe.updates_per_step)
        return replace(optimizer, mu_dtype=run.mu_dtype, gradient_wire=run.gradient_wire)


def build_setup(
    run: RunConfig,
    recipe: Recipe,
    tokenizer: Tokenizer | None = None,
    model: ModelConfig | None = None,
    code: Mapping[str, bytes] | None = None,
) -> Setup:
    """Builds the constant parts of a run. Starts a task's worker processes: close the task at the
    end.

    Args:
      tokenizer: tokenizer of a run that is resumed or evaluated; None makes it as configured.
      model: the same, for a run that started from a public checkpoint.
      code: contents of the run's copies of the user's own files; None reads the originals.

    Raises:
      ValueError: for any invalid setting.
    """
    layout = Layout.parse(run.layout)
    setting = f"layout {run.layout!r}"
    devices = first_devices(layout.num_devices, setting, "choose another layout")
    if is_multiprocess() and jax.device_count() > layout.num_devices:
        raise ValueError(
            f"{setting} takes {layout.num_devices} devices, and the processes of the run have "
            f"{jax.device_count()}: each must use its devices, so choose a layout of all."
        )
    if run.checkpoint is not None and model is None:
        _, model = open_checkpoint(run.model, run.ignore_options)
    elif run.checkpoint is None and run.model not in PRESETS:
        if (download := download_command(run.model)) is not None:
            raise ValueError(
                f"model={run.model!r} is neither a preset nor a folder. A model of the Hugging "
                f"Face Hub is downloaded first: {download}"
            )
        near = difflib.get_close_matches(run.model, PRESETS) or list(PRESETS)
        raise ValueError(
            f"model={run.model!r} is not a preset; near: {', '.join(near)}. A published checkpoint "
            "is given as its folder, gguf:FILE or pip:NAME."
        )
    task = _task(run, recipe, code)
    try:
        if tokenizer is None:
            tokenizer = _tokenizer(run, task, model)
        network = model or preset(run.model, tokenizer.vocab_size)
        network = network_of(network.with_unused_ids(tokenizer.unused_ids), run)
        mesh = fold(layout, devices)
        format, rows, dropped = _format(run, recipe, tokenizer), None, 0
        if isinstance(task, Chats):
            supervision = recipe.supervision
            assert isinstance(format, ChatFormat) and supervision is not None
            rows = chat_rows(task, format, supervision, network, mesh)
            # No number was given: as many as the recipe's epochs take.
            if not run.steps:
                run = replace(run, steps=recipe.steps_of(task.num_train))
            prompt, response = sampled_lengths(task, rows, network, run.response_length)
        else:
            check_answers(run, task)
            _check_tools(task, format)
            prompt, dropped = fit_prompts(run, task, format)
            response = response_length(run, task, tokenizer, network, prompt)
        # In this order: windows depend on the limit of responses, micro-batches on rows and
        # lengths.
        setup = Setup(
            run=run,
            recipe=recipe.fitted(response),
            task=task,
            tokenizer=tokenizer,
            model=with_dispatch(network, run, mesh),
            mesh=mesh,
            prompt_length=prompt,
            response_length=response,
            prompts_dropped=dropped,
            rows=rows,
        )
        setup = replace(setup, recipe=setup.geometry.with_micro_batch().recipe)
        check_layout(replace(setup, model=network))
        _check_fits(setup)
    # Worker processes must not outlive a run that is rejected or interrupted.
    except BaseException:
        task.close()
        raise
    return setup


def check_layout(setup: Setup) -> None:
    """Checks that the network and the batches of a run divide over its layout; raises ValueError,
    naming what does not."""
    network, geometry = setup.model, setup.geometry
    check_supported(Model(network, setup.mesh))
    check_dispatchers(network, setup.rollout_mesh)
    check_shardable(network, setup.mesh, setup.rollout_mesh)
    geometry.check()
    check_overlaps(Model(network, setup.mesh), *geometry.overlap_units(setup.run.packing))
    geometry.slots(setup.run.slots)


def _task(run: RunConfig, recipe: Recipe, code: Mapping[str, bytes] | None) -> Task:
    """Loads the task: prompts with a verifier, or conversations for SFT."""
    fields = Fields(run.prompt_field, run.answer_field, run.messages_field)
    if recipe.supervision is not None:
        heldout, last = parse_heldout(run.held_out), recipe.supervision.last_turn
        return load_chats(run.task, run.seed, fields, held_out=heldout, last=last)
    if run.unsafe_tools:
        allow_unsafe()
    return load_task(
        run.task,
        run.seed,
        fields,
        run.verifiers,
        held_out=run.held_out,
        rewards=run.rewards,
        code=code,
        answers=run.answers,
        unreadable_answers=run.unreadable_answers,
        needs_rewards=recipe.uses_rewards,
    )


def _format(run: RunConfig, recipe: Recipe, tokenizer: Tokenizer) -> PromptFormat:
    """Encoding of prompts to tokens, or of conversations for SFT."""
    format = prompt_format(run, tokenizer)
    if recipe.supervision is None:
        return format
    last = recipe.supervision.last_turn
    return ChatFormat(
        format.tokenizer, format.template, format.system_prompt, format.template_arguments, last
    )


def _tokenizer(run: RunConfig, task: Task, model: ModelConfig | None) -> Tokenizer:
    """Tokenizer of a new run; `model` is the checkpoint's, None for a preset."""
    if run.tokenizer is not None:
        size = None if model is None else model.vocab_size
        return with_template(run, load_tokenizer(run.tokenizer, size))
    if run.checkpoint is not None and model is not None:
        from jrl.text.json_tokenizer import checkpoint_tokenizer  # needs an extra

        return with_template(run, checkpoint_tokenizer(run.checkpoint, model.vocab_size))
    if run.chat_template not in (CHECKPOINT_TEMPLATE, NO_TEMPLATE):
        raise ValueError(
            f"chat_template={run.chat_template!r} needs a tokenizer with its special tokens: give "
            "--tokenizer or a checkpoint as --model."
        )
    return Tokenizer.train_characters(task.characters)


def _check_may_be_stale(recipe: Recipe, max_staleness: int) -> None:
    """Rejects recipes that cannot run asynchronously, as a step depends on the step before."""
    if recipe.staleness_obstacle is not None:
        raise ValueError(
            f"max_staleness={max_staleness}: {recipe.name} {recipe.staleness_obstacle}: leave out "
            "--max-staleness, or choose another recipe."
        )


def _check_may_converse(run: RunConfig, recipe: Recipe) -> None:
    """Rejects settings under which conversations continue in another step, as environments are not
    saved in checkpoints."""
    if not recipe.has_complete_groups:
        raise ValueError(
            f"task={run.task} has conversations, which {recipe.name} would continue in another "
            "step, and their environments are not saved: choose another recipe."
        )
    if run.max_staleness:
        raise ValueError(
            f"max_staleness={run.max_staleness} saves rows in flight, and task={run.task} has "
            "environments, which are not saved: leave out --max-staleness."
        )


def _check_tools(task: Task, format: PromptFormat) -> None:
    """Rejects tools that the prompt format does not show to the policy, or whose calls it cannot
    parse."""
    for source in task.sources if isinstance(task, Mixture) else (task,):
        if has_environments(source):
            format.check_tools(source.train(0))


def _check_fits(setup: Setup) -> None:
    """Checks that network and tokenizer have the same vocabulary, that the network supports the
    rollout split and packing, and that the recipe's networks and its state fit the run."""
    run, model, tokenizer = setup.run, setup.model, setup.tokenizer
    pp = setup.mesh.layout.pp
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only "
            f"{model.vocab_size}: take the tokenizer of the checkpoint."
        )
    if tokenizer.vocab_size < model.vocab_size:
        raise ValueError(
            f"the model has {model.vocab_size} ids, which it may all sample, and the "
            f"tokenizer only {tokenizer.vocab_size}: take the tokenizer of the checkpoint, "
            "or its tokenizer.json, which may have fewer tokens."
        )
    if setup.split is not None:
        placement = first_placement(model, setup.split, run.rollout_expert_slots)
        check_splits(model, setup.split, placement)
    if run.packing and pp > 1:
        raise ValueError(
            f"packing=True is not supported with pp={pp} of layout {run.layout!r}, "
            "which runs a fixed number of micro-batches: leave out --packing, or choose a layout "
            "without pp."
        )
    check_networks(setup.recipe, setup.response_length)
