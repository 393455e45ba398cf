"""Code that the settings of a run name: its recipe, tasks, rewards and the command of alarms."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.recipes import Recipe
from jrl.recipes.load import read_recipe, source_of
from jrl.runs.folder import RunFolder
from jrl.runs.provenance import recorded_files
from jrl.runs.records import offset_of
from jrl.runs.trust import check_trusted
from jrl.tasks.load import custom_files, custom_modules


@dataclass(frozen=True)
class RunCode:
    """Code of a run, as it was read.

    Attributes:
      recipe: content of the recipe's file; None for a recipe of the library.
      files: contents of the files of tasks and rewards, by the names of their copies in ``code/``.
      texts: names of modules, and a shell command.
    """

    recipe: bytes | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    texts: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, bytes]:
        """All contents by name: ``recipe.py``, ``code/sums-1a2b3c4d.py``, ``package.module:f``."""
        recipe = {} if self.recipe is None else {"recipe.py": self.recipe}
        files = {f"code/{name}": content for name, content in self.files.items()}
        return {**recipe, **files, **{text: text.encode() for text in self.texts}}


def code_of(run: RunConfig, recipe: Recipe) -> RunCode:
    """Code of a new run, read from the user's own files."""
    return RunCode(source_of(recipe), custom_files(run.task, run.reward), _texts(run))


def code_to_resume(folder: RunFolder, words: Iterable[str], *, trusted: bool) -> RunCode:
    """Code of a run folder that is resumed; ValueError for code that the user does not trust.

    Args:
      words: what the user gives now, such as the path of a task.
      trusted: true if the user trusts the folder.
    """
    run = run_of(folder)
    code = code_of_task(folder, run.task, run.reward)
    recipe = read_recipe(folder.config().get("recipe"), folder.path)
    code = replace(code, recipe=recipe, texts=_texts(run))
    check_code(folder, code, trusted=trusted, named=_named_code(words))
    return code


def code_of_task(folder: RunFolder, task: str, rewards: tuple[str, ...]) -> RunCode:
    """Code of the task and rewards of a run folder, from its copies."""
    files = custom_files(task, rewards, folder.code_path)
    return RunCode(files=files, texts=custom_modules(task, rewards))


def check_code(
    folder: RunFolder, code: RunCode, *, trusted: bool, named: Collection[bytes] = ()
) -> None:
    """Raises ValueError for code of a run folder that differs from the code at its last checkpoint,
    and for code that the user does not trust."""
    step, saved = recorded_files(folder)
    current = {name: offset_of(content) for name, content in code.parts.items()}
    folder.check_same_files(step, current, saved)
    if not trusted:
        check_trusted(folder.path, code.parts, named)


def _texts(run: RunConfig) -> tuple[str, ...]:
    commands = () if run.fault_command is None else (run.fault_command,)
    return (*custom_modules(run.task, run.reward), *commands)


def _named_code(words: Iterable[str]) -> set[bytes]:
    """Contents of all that the words of a command line name, and the words themselves."""
    named: set[bytes] = set()
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        named.add(value.encode())
        with suppress(ValueError):  # it is no task, or its file is not there any more
            named |= set(custom_files(value, ()).values())
            named |= {text.encode() for text in custom_modules(value, ())}
    return named
