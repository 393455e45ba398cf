"""Flags of ``python -m jrl.train``: the command, the fields of the run and of its recipe."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from jrl.checks import flag
from jrl.config.files import changeable_settings, check_resumable, configuration_of
from jrl.config.run import RECORDS, RunConfig
from jrl.config.run_code import RunCode, code_to_resume
from jrl.config.settings_file import GROUPS, Settings, read_settings
from jrl.config.training import AUTO
from jrl.processes.coordinator import SINGLE_PROCESS, Processes
from jrl.program import program
from jrl.recipes import RECIPES, Recipe
from jrl.recipes.load import LIBRARY, load_recipe
from jrl.runs.directory import storage_path
from jrl.runs.folder import RunFolder, local_path
from jrl.runs.trust import TRUST_FLAG
from jrl.setting import names_with, property_of, replacement_of, setting
from jrl.tasks.data.split import check_trains
from sharding.folding import Layout

DEFAULT_RECIPE = "grpo"
REINFORCEMENT = (
    "Trains a policy by reinforcement learning. Without arguments: a small MoE model learns to "
    "sort digits with GRPO, in about two minutes on a laptop. The recipes are "
    f"{', '.join(RECIPES)}. The stage before is sft, supervised fine-tuning on conversations."
)
SUPERVISED_STAGE = (
    "Supervised fine-tuning: trains a policy on the assistant's turns of conversations. "
    "Reinforcement learning continues from its run: jrl train grpo --weights RUN."
)

Record = TypeVar("Record")


@dataclass(frozen=True)
class Command:
    """Run folder, settings file, resume and dry run."""

    run_dir: str | None = None
    """Folder of the run, a new one unless --resume is given; None takes the next
    runs/RECIPE-TASK-NUMBER."""
    resume: Annotated[
        tyro.conf.FlagCreatePairsOff[bool],
        tyro.conf.arg(
            help="Resume the run in --run-dir from its last checkpoint, with its settings. Only "
            "--steps (upwards), --micro-batch and "
            + ", ".join(flag(name) for name in changeable_settings(RunConfig) if name != "steps")
            + " may change."
        ),
    ] = setting(False, in_file=False)
    resume_if_exists: tyro.conf.FlagCreatePairsOff[bool] = setting(False, in_file=False)
    """Resume the run in --run-dir if there is one, and start it otherwise: one command for a
    scheduler, which repeats it after a failure."""
    trust_run_code: tyro.conf.FlagCreatePairsOff[bool] = setting(False, in_file=False)
    """On --resume, run the code of the run folder (recipe.py, code/, modules and the command of
    --on-fault) though this user has not given it to a command on this machine."""
    config: str | None = setting(None, in_file=False)
    """A YAML file of flags by name (learning_rate: 1e-6), such as the run.yaml of a run, or
    preset:NAME for one that comes with the library; flags on the command line take precedence."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = setting(False, in_file=False)
    """Print batch arithmetic, parameters, memory and layout, and exit."""
    log_json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print each line of the run as a JSON object with time, level, host, process and message."""


@dataclass(frozen=True)
class TrainOptions:
    """Parsed command line: the command, the run, its recipe and its processes; the code of a run
    that is resumed; and the settings file."""

    command: Command
    run: RunConfig
    recipe: Recipe
    processes: Processes = SINGLE_PROCESS
    code: RunCode | None = None
    settings: Settings | None = None

    def check_data(self) -> None:
        """Raises ValueError if a file of data that a preset names is missing."""
        if self.settings is not None:
            files = {"task": self.run.task, "held_out": self.run.held_out}
            self.settings.check_data(files)


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
    stored, code = None, None
    if folder is not None:
        stored, code = _read_stored(RunFolder.read(folder), arguments, recipe_word, settings)
    if stored is None:
        recipe = (kind or load_recipe(DEFAULT_RECIPE))()
        run = default_run(type(recipe))
    else:
        # Code that the policy writes runs as the user by a flag of this command only.
        run, recipe = replace(stored[0], unsafe_tools=False), stored[1]
        # A user's own recipe is identified by its content: another version is another class.
        if kind is not None and kind is not type(recipe):
            requested = recipe_word or (settings and settings.recipe)
            raise ValueError(
                f"a resumed run keeps its settings: the recipe is {recipe.name} in the run, "
                f"{requested} was given. Leave it out, or start a new run."
            )
    # Parsed without names of earlier versions: they are no choices of a flag.
    names = (field.name for field in fields(run))
    removed = {
        name: getattr(run, name)
        for name in names
        if replacement_of(RunConfig, name, getattr(run, name)) is not None
    }
    run = replace(run, **dict.fromkeys(removed))
    command, processes, new_run, new_recipe = _parse_flags(arguments, run, recipe, settings)
    # The name in a settings file is of the model in it.
    if settings is not None and new_run.model != settings.values.get("model", new_run.model):
        stated = settings.values.get("base_name")
        new_run = replace(new_run, base_name=None) if new_run.base_name == stated else new_run
    unreplaced = {name: value for name, value in removed.items() if getattr(new_run, name) is None}
    new_run = replace(new_run, **unreplaced)
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
    return TrainOptions(command, run, recipe, processes, code, settings)


def _read_stored(
    folder: RunFolder, arguments: list[str], recipe_word: str | None, settings: Settings | None
) -> tuple[tuple[RunConfig, Recipe], RunCode]:
    """Run and recipe of a run that is resumed, and its code, which the user trusts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(TRUST_FLAG, "--trust_run_code", action="store_true")
    trusted = parser.parse_known_args(arguments)[0].trust_run_code
    words = [*arguments, str(recipe_word)]
    if settings is not None:
        words.append(str(settings.path.parent / str(settings.recipe)))
        for value in settings.values.values():
            words += map(str, value if isinstance(value, list) else [value])
    code = code_to_resume(folder, words, trusted=trusted)
    return configuration_of(folder, code.recipe), code


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
    """Recipe that a settings file names; None if it names no recipe."""
    if settings is None or settings.recipe is None:
        return None
    try:
        return load_recipe(settings.recipe, settings.path.parent)
    except ValueError as error:
        raise ValueError(f"{settings.path}: {error}") from error


def _resumed_folder(arguments: list[str], settings: Settings | None) -> str | None:
    """Folder of the run that --resume continues, or --resume-if-exists if it holds a run.

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
    """Parses the flags. Defaults come from `settings`, then from `run` and `recipe`; these two are
    returned unchecked."""
    kind, command, processes = type(recipe), Command(), SINGLE_PROCESS
    run, recipe = _unchecked(RunConfig, run, kind), _unchecked(kind, recipe, kind)
    if settings is not None:
        settings.check_names(
            Command,
            Processes,
            RunConfig,
            kind,
            command_line_only=names_with(Command, "in_file", False),
        )
        command, processes = settings.apply_to(command), settings.apply_to(processes)
        run, recipe = settings.apply_to(run), settings.apply_to(recipe)
    recipe_names = tuple(dict.fromkeys((*LIBRARY, recipe.name)))
    recipe_literal = Literal[recipe_names]  # pyright: ignore[reportInvalidTypeForm]
    help_text = (
        "Comes first. A custom recipe is path/to/file.py:Name. Each recipe has its own flags: "
        f"{program('train')} dapo --help"
    )
    name = tyro.conf.arg(name="recipe", help=help_text)
    # --help has a group for each record.
    groups = {"command": command, "processes": processes, recipe.name: recipe}
    groups |= {_group_name(record): _unchecked(record, run, kind) for record in RECORDS}
    flags = make_dataclass(
        "Flags",
        [
            ("word", Annotated[recipe_literal, tyro.conf.Positional, name]),
            *((name, tyro.conf.OmitArgPrefixes[type(group)]) for name, group in groups.items()),
        ],
    )
    parsed = vars(
        tyro.cli(
            flags,
            prog=program("train"),
            description=SUPERVISED_STAGE if recipe.supervised else REINFORCEMENT,
            args=arguments,
            default=flags(recipe.name, **groups),
        )
    )
    if parsed["word"] != recipe.name:
        raise ValueError(f"the recipe comes first: {program('train')} {parsed['word']} ...")
    values: dict[str, Any] = {}
    for record in RECORDS:
        values |= _values(parsed[_group_name(record)])
    return parsed["command"], parsed["processes"], replace(run, **values), parsed[recipe.name]


def _group_name(record: type) -> str:
    """Name of a record in --help, for example "monitoring" of `MonitoringSettings`."""
    return record.__name__.removesuffix("Settings").lower()


def _unchecked(kind: type[Record], source: Any, recipe: type[Recipe]) -> Record:
    """Record of this kind with the values of `source`, which accepts any values, so that all flags
    are parsed before any is validated; without the flags that have no effect in a recipe, and with
    the recipe's help texts for the others."""
    values = {field.name: getattr(source, field.name) for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    hints = get_type_hints(kind, include_extras=True)
    annotations: dict[str, Any] = {}
    for name in values if recipe.supervised else ():
        help_text = property_of(kind, name, "sft")
        if help_text is False:
            annotations[name] = Annotated[hints[name], tyro.conf.Fixed, tyro.conf.Suppress]
        elif help_text is not None:
            annotations[name] = Annotated[hints[name], tyro.conf.arg(help=help_text)]
    body = {
        "__annotations__": annotations,
        "__post_init__": lambda self: None,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    unchecked: Any = type(kind.__name__, (kind,), body)
    return unchecked(**values)


def _values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def default_run(kind: type[Recipe]) -> RunConfig:
    """Default run settings of a command line with this recipe."""
    return RunConfig(steps=0, warm_start_steps=0) if kind.supervised else RunConfig()


def idle_fields(kind: type[Recipe]) -> set[str]:
    """Fields of a run and of this recipe that have no effect in it and are no flags of it."""
    if not kind.supervised:
        return set()
    return {name for record in (RunConfig, kind) for name in names_with(record, "sft", False)}


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
