"""Flags of ``python -m jrl.train``: the command, the fields of the run, those of its recipe."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from jrl.config.files import check_resumable, configuration_of
from jrl.config.run import AUTO, RunConfig
from jrl.config.settings_file import GROUPS, Settings, read_settings
from jrl.processes.coordinator import SINGLE_PROCESS, Processes
from jrl.recipes import RECIPES, Recipe
from jrl.recipes.load import LIBRARY, load_recipe
from jrl.runs.directory import storage_path
from jrl.runs.folder import RunFolder, local_path
from jrl.tasks.data.split import check_trains
from sharding.folding import Layout

PROGRAM = "python -m jrl.train"
DEFAULT_RECIPE = "grpo"
ON_COMMAND_LINE = ("config", "dry_run", "resume", "resume_if_exists")
"""Flags that a settings file may not contain."""

REINFORCEMENT = (
    "Trains a policy by reinforcement learning. Without arguments: a small MoE model learns to "
    "sort digits with GRPO, in about two minutes on a laptop. The recipes are "
    f"{', '.join(RECIPES)}. The stage before is sft, supervised fine-tuning on conversations."
)
SUPERVISED_STAGE = (
    "Supervised fine-tuning: trains a policy on the assistant's turns of conversations. "
    f"Reinforcement learning continues from its run: {PROGRAM} grpo --weights RUN."
)

Record = TypeVar("Record")


@dataclass(frozen=True)
class Command:
    """Run folder, settings file, resume and dry run."""

    run_dir: str | None = None
    """Folder of the run, a new one unless --resume is given; None takes the next
    runs/RECIPE-TASK-NUMBER."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume the run in --run-dir from its last checkpoint, with its settings. Only --steps
    (upwards), settings of the machine (--layout, --rollout-layout, --rollout-devices,
    --rollout-engine, --rollout-split, --rollout-micro-batches, --devices, --slots, --micro-batch,
    --context, --dispatch, --server-devices, --attention, --decode-attention, --latent, --router,
    --experts, --expert-chunks, --remat, --fsdp, --buffer-factor, --scan-layers, --vocab-chunk,
    --packing, --verifiers, --unsafe-tools), --checkpoint-every, --keep-checkpoints,
    --checkpoint-dir, --samples-every, --sample-tokens, --max-nonfinite, --drift-alarm, --log-to,
    --metrics-port, --step-deadline, --hang-deadline and the settings of faults may change."""
    resume_if_exists: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume the run in --run-dir if there is one, and start it otherwise: one command for a
    scheduler, which repeats it after a failure."""
    config: str | None = None
    """A YAML file of flags by name (learning_rate: 1e-6), such as the run.yaml of a run, or
    preset:NAME for one that comes with the library; flags on the command line take precedence."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print batch arithmetic, parameters, memory and layout, and exit."""
    log_json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print each line of the run as a JSON object with time, level, host, process and message."""


@dataclass(frozen=True)
class TrainOptions:
    """Parsed command line: the command, the run, its recipe and its processes."""

    command: Command
    run: RunConfig
    recipe: Recipe
    processes: Processes = SINGLE_PROCESS


def parse_arguments(arguments: list[str]) -> TrainOptions:
    """Parses a command line. Settings that it lacks come from its --config; those that both lack
    come, on --resume, from the run.

    Raises:
      ValueError: on an unknown recipe, on invalid settings, and on --resume on settings that differ
        from the run's.
    """
    recipe_word, arguments = _recipe_word(arguments)
    settings = _settings(arguments)
    folder = _resumed_folder(arguments, settings)
    kind = load_recipe(recipe_word) if recipe_word else _recipe_from(settings)
    stored = None if folder is None else configuration_of(RunFolder.read(folder))
    if stored is None:
        recipe = (kind or load_recipe(DEFAULT_RECIPE))()
        run = default_run(type(recipe))
    else:
        run, recipe = stored
        # A user's own recipe is identified by its content: another version is another class.
        if kind is not None and kind is not type(recipe):
            requested = recipe_word or (settings and settings.recipe)
            raise ValueError(
                f"a resumed run keeps its settings: the recipe is {recipe.name} in the run, "
                f"{requested} was given. Leave it out, or start a new run."
            )
    command, processes, new_run, new_recipe = _parse_flags(arguments, run, recipe, settings)
    if stored is not None:
        command = replace(command, resume=True)
        check_resumable(stored, (new_run, new_recipe))
    run, recipe = RunConfig(**_values(new_run)), type(recipe)(**_values(new_recipe))
    check_idle(run, recipe)
    check_trains(run.held_out)
    if command.run_dir is not None:
        if not command.run_dir:  # as of a shell variable that is not set
            raise ValueError("run_dir='' is empty: give a folder, or leave out --run-dir.")
        local_path(command.run_dir)
    if run.checkpoint_dir is not None:  # also for commands in another working directory
        run = replace(run, checkpoint_dir=str(storage_path(run.checkpoint_dir)))
    if run.layout != AUTO:
        recipe = recipe.divided(Layout.parse(run.layout).dp)
    return TrainOptions(command, run, recipe, processes)


def _recipe_word(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Splits the arguments into the recipe name and the others.

    The name is the value of ``--recipe``, the first word, or a recipe's name that is no flag's
    value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    if "--recipe" in arguments[-1:]:
        raise ValueError("--recipe needs a name, or path/to/file.py:Name.")
    parsed, others = parser.parse_known_args(arguments)
    if parsed.recipe is not None:
        return parsed.recipe, others
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    for index, (previous, word) in enumerate(pairwise(arguments)):
        if word in LIBRARY and (not previous.startswith("-") or "=" in previous):
            return word, [*arguments[: index + 1], *arguments[index + 2 :]]
    return None, arguments


def _settings(arguments: list[str]) -> Settings | None:
    """Settings of the file that --config names; None without --config."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    if "--config" in arguments[-1:]:
        raise ValueError("--config needs a YAML file, or preset:NAME.")
    reference = parser.parse_known_args(arguments)[0].config
    return None if reference is None else read_settings(reference)


def _recipe_from(settings: Settings | None) -> type[Recipe] | None:
    """Recipe that a settings file names; None where it names none."""
    if settings is None or settings.recipe is None:
        return None
    try:
        return load_recipe(settings.recipe, settings.path.parent)
    except ValueError as error:
        raise ValueError(f"{settings.path}: {error}") from error


def _resumed_folder(arguments: list[str], settings: Settings | None) -> str | None:
    """Folder of the run that --resume continues, or --resume-if-exists where it holds a run.

    All processes of a run find the same: process 0 makes the folder after all have connected.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-if-exists", "--resume_if_exists", action="store_true")
    parser.add_argument("--run-dir", "--run_dir", nargs="?")
    parser.add_argument("-h", "--help", action="store_true")
    parsed = parser.parse_known_args(arguments)[0]
    if parsed.help or not (parsed.resume or parsed.resume_if_exists):
        return None
    file_command = Command() if settings is None else settings.apply_to(Command())
    run_dir = parsed.run_dir or file_command.run_dir
    if run_dir is not None:
        return run_dir if parsed.resume or RunFolder(run_dir).config_path.is_file() else None
    if parsed.resume:
        raise ValueError("--resume needs --run-dir: give the folder of the run to resume.")
    raise ValueError("--resume-if-exists needs --run-dir: give the folder of the run.")


def _parse_flags(
    arguments: list[str], run: RunConfig, recipe: Recipe, settings: Settings | None
) -> tuple[Command, Processes, RunConfig, Recipe]:
    """Parses the flags. Defaults are those of `settings`, then of `run` and `recipe`; these two are
    returned unchecked."""
    kind, command, processes = type(recipe), Command(), SINGLE_PROCESS
    run, recipe = _unchecked(run, kind), _unchecked(recipe, kind)
    if settings is not None:
        settings.check_names(
            Command, Processes, type(run), type(recipe), command_line_only=ON_COMMAND_LINE
        )
        command, processes = settings.apply_to(command), settings.apply_to(processes)
        run, recipe = settings.apply_to(run), settings.apply_to(recipe)
    recipe_names = tuple(dict.fromkeys((*LIBRARY, recipe.name)))
    recipe_literal = Literal[recipe_names]  # pyright: ignore[reportInvalidTypeForm]
    help_text = (
        "Comes first. A custom recipe is path/to/file.py:Name. Each recipe has its own flags: "
        f"{PROGRAM} dapo --help"
    )
    name = tyro.conf.arg(name="recipe", help=help_text)
    flags = make_dataclass(
        "Flags",
        [
            ("word", Annotated[recipe_literal, tyro.conf.Positional, name]),
            ("command", tyro.conf.OmitArgPrefixes[Command]),
            ("processes", tyro.conf.OmitArgPrefixes[Processes]),
            ("run", tyro.conf.OmitArgPrefixes[type(run)]),
            (recipe.name, tyro.conf.OmitArgPrefixes[type(recipe)]),
        ],
    )
    parsed = vars(
        tyro.cli(
            flags,
            prog=PROGRAM,
            description=SUPERVISED_STAGE if recipe.supervised else REINFORCEMENT,
            args=arguments,
            default=flags(recipe.name, command, processes, run, recipe),
        )
    )
    if parsed["word"] != recipe.name:
        raise ValueError(f"the recipe comes first: {PROGRAM} {parsed['word']} ...")
    return parsed["command"], parsed["processes"], parsed["run"], parsed[recipe.name]


def _unchecked(record: Record, recipe: type[Recipe]) -> Record:
    """Copy of the record that accepts any values, so that all flags are parsed before any is
    validated; without the flags that have no effect in a recipe, and with the recipe's help texts
    for the others."""
    kind, values = type(record), _values(record)
    hints = get_type_hints(kind, include_extras=True)
    annotations: dict[str, Any] = {}
    for name in values:
        if name in idle_fields(recipe):
            annotations[name] = Annotated[hints[name], tyro.conf.Fixed, tyro.conf.Suppress]
        elif recipe.supervised and name in SUPERVISED_HELP:
            help_text = SUPERVISED_HELP[name]
            annotations[name] = Annotated[hints[name], tyro.conf.arg(help=help_text)]
    body = {
        "__annotations__": annotations,
        "__post_init__": lambda self: None,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    unchecked: Any = type(kind.__name__, (kind,), body)
    return unchecked(**_values(record))


def _values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


IDLE_FIELDS = frozenset(
    {
        # Prompts, rewards and verifiers.
        *("overlong_prompts", "prompt_length", "answers", "unreadable_answers"),
        *("reward", "reward_weights", "reward_seconds"),
        *("failed_reward", "shuffle_rewards", "verifiers", "unsafe_tools"),
        *("reward_correct", "reward_wrong"),
        # Sampling of training completions.
        *("slots", "max_staleness", "stale_cache", "rollout_layout", "rollout_devices"),
        *("rollout_engine", "rollout_split", "rollout_micro_batches", "sample_tokens"),
        *("rollout_m2n", "rollout_expert_slots", "rollout_replan"),
        *("drift_alarm", "prompts", "group_size", "mini_batch", "temperature", "top_k", "top_p"),
        *("dynamic_sampling", "max_generation_rounds", "overlong_filter"),
        # The mismatch of sampler and trainer, and the policy's loss.
        *("old_logprobs", "mismatch", "mismatch_denominator", "mismatch_level", "mismatch_low"),
        *("mismatch_high", "mismatch_mean", "rejection", "rejection_over", "rejection_low"),
        *("rejection_high", "router_replay", "clip_low", "clip_high", "clip_dual"),
        *("entropy_coef", "kl_coef"),
        *("warm_start_accuracy", "warm_start_steps", "warm_start_batch"),
        "warm_start_learning_rate",
    }
)
"""Fields of a run and of its recipe that have no effect here: they are no flags."""

SUPERVISED_HELP = {
    "task": "The conversations: jsonl:PATH, parquet:PATH or dataset:DIR (of save_to_disk), each "
    "with messages, or with a prompt and a completion.",
    "held_out": "Held-out conversations to measure the loss on: a share of them (0.05), a number "
    "(200), or a file of other conversations. None is one in ten.",
    "steps": "Training steps, each one optimizer step on a batch. 0 takes as many as --epochs.",
    "model": "A preset (tiny, tiny-dense or small), or a published checkpoint (DIR, gguf:FILE or "
    "pip:NAME), its weights and its tokenizer.",
    "weights": "Run folder whose latest policy to start from.",
    "chat_template": 'Chat template for conversations: "checkpoint" is the one that comes with '
    'the tokenizer, if there is one; "none" uses none; anything else is the path of a Jinja file.',
    "prompt_field": "Field of a record with the prompt, a text, if the record has no messages.",
    "answer_field": 'Field with the completion, if the record has no "completion".',
    "messages_field": "Field with the conversation, a list of {role, content}; None takes "
    '"messages" where a record has no prompt.',
    "packing": "Sequence packing: conversations are concatenated, so that no padding is computed "
    "and the LM head sees only loss tokens. Not supported with pp. None packs where it is "
    "supported.",
    "response_length": "Maximum tokens of the sample completions in samples.jsonl; None is a "
    "quarter above the longest held-out answer, and at least 16 tokens.",
    "eval_every": "Steps between evaluations on held-out conversations.",
    "eval_prompts": "Held-out conversations per evaluation, or all if there are fewer.",
    "checkpoint_every": "Steps between checkpoints. The first is taken before the first step, the "
    "last at the end.",
    "samples_every": "Steps between completions of held-out prompts written to samples.jsonl.",
    "aggregation": "Aggregation of token losses: token-mean weighs all loss tokens equally, the "
    "others each conversation.",
    "capacity_factor": "Capacity of an expert in training, as a multiple of its tokens under "
    "balanced routing; None is the network's own, mostly unlimited (dropless).",
}
"""Help texts of flags that mean something else here, or more."""


def default_run(kind: type[Recipe]) -> RunConfig:
    """Default run settings of a command line with this recipe."""
    return RunConfig(steps=0, warm_start_steps=0) if kind.supervised else RunConfig()


def idle_fields(kind: type[Recipe]) -> frozenset[str]:
    """Fields without effect in this recipe, which are no flags of it."""
    return IDLE_FIELDS if kind.supervised else frozenset()


def check_idle(run: RunConfig, recipe: Recipe) -> None:
    """Raises ValueError for a value in a settings file for a field that has no effect."""
    kind = type(recipe)
    idle = idle_fields(kind)
    for record, defaults in ((run, default_run(kind)), (recipe, kind())):
        for name, value in _values(record).items():
            if name in idle and value != getattr(defaults, name):
                owner = recipe.name
                raise ValueError(f"{name}={value!r} changes nothing in {owner}: leave it out.")


def drop_idle(config: Mapping[str, Any], kind: type[Recipe]) -> dict[str, Any]:
    """Contents of config.json without the fields that are no flags."""
    idle = idle_fields(kind)
    remaining = {
        group: {name: value for name, value in config[group].items() if name not in idle}
        for group in GROUPS
    }
    return {**config, **remaining}
