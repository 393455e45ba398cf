"""Flags of ``python -m jrl.evaluate``, and the settings of a run with their changes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from jrl.checks import check_seed
from jrl.config.files import recipe_to_sample, run_of
from jrl.config.run import RunConfig
from jrl.config.run_code import check_code, code_of_task
from jrl.processes.coordinator import SINGLE_PROCESS, Processes
from jrl.published.adapters import check_of_checkpoint
from jrl.published.location import is_checkpoint
from jrl.recipes import Recipe
from jrl.recipes.base.hyperparameters import Hyperparameters
from jrl.recipes.grpo import Grpo
from jrl.runs.folder import RunFolder
from jrl.setting import check_settings, names_with, setting
from jrl.tasks.data.split import HELDOUT_SHARE
from jrl.tasks.load import listed_names

DEFAULT_PROMPTS = 256
"""Default number of prompts to evaluate: of the prompts that a run holds out, and of an endless
task."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Settings of an evaluation: the policy, the prompts, the sampling and the devices."""

    run: tyro.conf.Positional[str]
    """Folder of the run, whose newest checkpoint is evaluated; or a published checkpoint: DIR,
    gguf:FILE or pip:NAME."""
    task: str | None = setting(None, override=False)
    """Task to evaluate on, as --task of jrl.train; a file is used in full. None takes the run's
    task and its held-out prompts."""
    held_out: str | None = None
    """Prompts to evaluate on, as --held-out of jrl.train; 1.0 is all of a list. None takes the
    run's held-out prompts, and with --task all of a file or of a custom list."""
    prompts: int | None = setting(None, minimum=1, override=False)
    """Maximum number of prompts, the first ones. None is all of --task, and 256 of a task that
    generates its prompts or of a run's held-out prompts."""
    k: int = setting(8, minimum=1)
    """Completions sampled per prompt; pass@k is reported for 1, 2, 4, ... and k."""
    samples: str | None = None
    """File to write the completions to, a JSON line for each: prompt, completion, answer, score,
    reason."""
    json: str | None = None
    """File to write the results to as JSON, in addition to the terminal."""
    show: int = setting(3, minimum=0)
    """Number of prompts whose completions are printed; 0 prints none."""

    lora: str | None = None
    """Folder of LoRA adapters in PEFT's format to merge into the published checkpoint."""
    ignore_options: tuple[str, ...] | None = None
    """Options of a checkpoint's config.json to pass over, as --ignore-options of jrl.train."""
    prompt_field: str | None = None
    """Field of a record with the prompt, as --prompt-field of jrl.train."""
    answer_field: str | None = None
    """Field with the reference answer: "answer", or "reward_model.ground_truth"."""
    messages_field: str | None = None
    """Field with the prompt as a conversation, a list of {"role": ..., "content": ...}."""
    answers: Literal["final", "evaluated"] | None = None
    """Required form of answers, as --answers of jrl.train; None takes the run's."""
    unreadable_answers: Literal["drop", "refuse"] | None = None
    """Records whose answer cannot be checked, as --unreadable-answers of jrl.train."""
    reward: tuple[str, ...] | None = None
    """Rewards, as --reward of jrl.train; None takes the run's, unless --task is given."""
    reward_weights: tuple[str, ...] | None = None
    """Their weights; None takes the run's, unless --task is given."""
    reward_seconds: float | None = None
    """Timeout of one call of a custom reward, in seconds."""
    failed_reward: float | None = None
    """The score of a completion whose reward failed."""
    verifiers: int | None = setting(None, minimum=1)
    """Processes that check answers or run rewards; None is one per processor core, up to 8."""
    unsafe_tools: bool = setting(False, override=False)
    """Run code that the policy writes as your user, as --unsafe-tools of jrl.train; a run that had
    it needs it again."""
    trust_run_code: tyro.conf.FlagCreatePairsOff[bool] = setting(False, override=False)
    """Run the custom task and rewards of the run folder (its code/ and modules) though this user
    has not given them to a command on this machine. No evaluation runs a recipe's code."""
    max_turns: int | None = None
    """Maximum turns of the policy in a multi-turn conversation with an environment."""
    turn_length: int | None = None
    """Maximum tokens of one turn of a conversation, as --turn-length of jrl.train."""

    prompt_length: int | None = None
    """Maximum tokens of a prompt; longer ones of a list are dropped. None takes the run's limit, or
    fits the longest prompt if --task is given."""
    overlong_prompts: Literal["drop", "refuse"] | None = None
    """Prompts with more tokens than that: drop and count them, or refuse to start."""
    response_length: int | None = None
    """Maximum tokens of a completion; None takes the run's limit."""
    tokenizer: str | None = setting(None, override=False)
    """Tokenizer for a published checkpoint in place of its own: a SentencePiece .model file, or a
    tokenizer.json with its tokenizer_config.json in the same folder."""
    chat_template: str | None = None
    """Chat template for prompts, as --chat-template of jrl.train: "checkpoint", "none", "hermes",
    "llama3", "mistral" or the path of a Jinja file; None takes the run's."""
    chat_template_kwargs: str | None = None
    """A JSON object of variables for the chat template, such as {"enable_thinking": false}; None
    takes the run's."""
    system_prompt: str | None = None
    """First message of every conversation that has no system message; None takes the run's."""

    temperature: float | None = None
    """Sampling temperature; None takes the run's."""
    top_k: int | None = None
    """Sample among this many most probable tokens (top-k); None takes the run's setting."""
    top_p: float | None = None
    """Sample from the smallest set of most probable tokens with this probability (top-p); None
    takes the run's setting."""
    seed: int = setting(0, override=False)
    """Random seed of sampling. The same seed gives the same completions."""

    slots: int | None = setting(None, minimum=1)
    """Completions decoded concurrently, a multiple of dp x tp of the layout that decodes. None is
    all of them, at most 512, and at most as many as fit a KV cache of 2 GiB on a CPU or of half of
    the memory that the weights leave on an accelerator."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the network's computation; None takes the dtype of the run or the checkpoint."""
    layout: str | None = setting(None, override=False)
    """Layout of the devices (parallelism), as --layout of jrl.train; None takes the run's layouts,
    dp1 for a checkpoint."""
    rollout_layout: str | None = setting(None, override=False)
    """Their layout for sampling completions; None derives it from --layout, if given."""
    devices: int | None = setting(None, minimum=1)
    """Number of fake CPU devices; None takes the run's."""
    diagnostics: bool = False
    """Also measure the run's critic, and write plots/value_diagnostics.png to its folder."""
    processes: tyro.conf.OmitArgPrefixes[Processes] = SINGLE_PROCESS

    @property
    def is_checkpoint(self) -> bool:
        """True for a public checkpoint, False for a run."""
        return is_checkpoint(self.run)

    def check(self) -> None:
        """Raises ValueError for invalid flags, and creates the folders of the output files."""
        check_settings(self)
        check_seed(self.seed)
        check_of_checkpoint(self.lora, self.run, self.is_checkpoint)
        if self.tokenizer is not None and not self.is_checkpoint:
            raise ValueError(
                f"tokenizer={self.tokenizer!r} is only for a published checkpoint; {self.run} has "
                "the tokenizer that it was trained with: leave it out."
            )
        for path in (self.json, self.samples):
            if path is not None:
                Path(os.path.expanduser(path)).absolute().parent.mkdir(parents=True, exist_ok=True)


def evaluation_configuration(
    options: EvaluateOptions, folder: RunFolder | None
) -> tuple[RunConfig, Recipe]:
    """Settings of the run in `folder`, or of a checkpoint if it is None, with the changes that
    the flags make; ValueError if a checkpoint has no task, and for invalid settings."""
    if folder is None:
        if options.task is None:
            raise ValueError(f"{options.run} is a checkpoint, which has no task: give --task.")
        run, recipe = RunConfig(model=options.run, steps=0, tokenizer=options.tokenizer), Grpo()
    else:
        run, recipe = run_of(folder), recipe_to_sample(folder)
        if run.lora_rank is not None and options.dtype is not None:
            raise ValueError(
                f"dtype={options.dtype!r} differs from that of the base weights that run "
                f"{folder.path} stores next to its adapters: leave it out."
            )
    changes = _overrides(options, RunConfig)
    if options.task is not None:
        # What was chosen for the run's own task need not fit another. Prompts have no answers to
        # imitate here, and need none.
        if recipe.supervised:
            recipe = Grpo()  # tasks have rewards, and not conversations
        # Nothing of them is trained on.
        changes.setdefault("held_out", "1.0" if listed_names(options.task) else None)
        task_defaults = {
            name: getattr(RunConfig, name) for name in names_with(RunConfig, "of_task")
        }
        changes = {**task_defaults, **changes, "task": options.task, "warm_start_steps": 0}
    changes["unsafe_tools"] = options.unsafe_tools
    # Implementations were chosen for the training devices; here the best that applies is used.
    # Slots were chosen for their memory, and for the run's own lengths.
    run = replace(run.on_one_mesh(), slots=None, **run.without_implementations)
    device_settings: dict[str, Any] = {}
    if run.rollout_devices is not None:
        # There is no training here: the layout's own devices sample.
        device_settings |= {"rollout_devices": None, "rollout_layout": None}
    if options.layout is not None:
        device_settings |= {"layout": options.layout, "rollout_layout": None}
    if options.rollout_layout is not None:
        device_settings["rollout_layout"] = options.rollout_layout
    recipe = replace(recipe, **_overrides(options, Hyperparameters))
    return replace(run, **{**device_settings, **changes}), recipe


def _overrides(options: EvaluateOptions, kind: type) -> dict[str, Any]:
    """Settings of this record that flags of the same name override."""
    overridden = names_with(kind, "override", None)
    flags = {name: getattr(options, name) for name in names_with(EvaluateOptions, "override", None)}
    return {name: flags[name] for name in overridden if flags.get(name) is not None}


def code_to_evaluate(options: EvaluateOptions, folder: RunFolder | None) -> Mapping[str, bytes]:
    """Files of the run's own task and rewards, if they are evaluated; ValueError for code that the
    user does not trust."""
    if folder is None or options.task is not None:
        return {}
    run = run_of(folder)
    code = code_of_task(folder, run.task, run.reward if options.reward is None else ())
    check_code(folder, code, trusted=options.trust_run_code)
    return code.files


def choose_num_prompts(options: EvaluateOptions, size: int | None) -> int:
    """Maximum number of prompts to evaluate, of a task that has `size`; None if it is endless."""
    if options.prompts is not None:
        return options.prompts
    return DEFAULT_PROMPTS if options.task is None or size is None else size


def training_data_notes(options: EvaluateOptions, folder: RunFolder | None) -> list[str]:
    """Notes on evaluated training data: a line for each list that is evaluated in full although
    the run was trained on it."""
    if folder is None or options.task is None or options.held_out is not None:
        return []
    run = run_of(folder)
    held_out = run.held_out or f"{HELDOUT_SHARE:g}"
    return [
        f"note: the run was trained on {task}; --held-out {held_out} selects the prompts that it "
        "was not trained on"
        for task in sorted(listed_names(options.task) & listed_names(run.task))
    ]
