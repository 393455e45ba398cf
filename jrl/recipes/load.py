"""Recipes by name: the library's, and a user's own from a Python file."""

import difflib
import sys
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from jrl.recipes import RECIPES, Recipe, Sft
from jrl.tasks.workers.user_code import load_source

COPY = "recipe.py"
"""File name of a user's recipe in the folder of a run."""
LIBRARY: dict[str, type[Recipe]] = {**RECIPES, "sft": Sft}
"""All recipes that are loaded by name, with supervised fine-tuning."""
LONG_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{NON-BREAKING HYPHEN}", "\N{MINUS SIGN}")
"""Characters that pages and word processors write for hyphens."""


def load_recipe(
    reference: str, folder: Path | str = ".", source: bytes | None = None
) -> type[Recipe]:
    """Loads a recipe class by name, or from a file: ``path/to/file.py:Name``.

    A file is executed once per content. It may import installed packages, but no files of its own
    folder, which are not copied into a run.

    Args:
      reference: a name of `LIBRARY`, or a file and the name of a class in it.
      folder: base of a relative path.
      source: content of the file; None reads it.

    Raises:
      ValueError: if there is no such recipe, or the class is not a recipe.
    """
    file, _, name = reference.rpartition(":")
    if not file:
        if reference not in LIBRARY:
            if reference.startswith(LONG_DASHES):
                raise ValueError(
                    f"{reference!r} begins with a dash that is no hyphen, as word processors write "
                    "it: type two hyphens (--)."
                )
            near = difflib.get_close_matches(reference.lower(), LIBRARY, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"recipe {reference!r} is unknown: {hint}The recipes are {', '.join(LIBRARY)}; a "
                "custom one is path/to/file.py:Name."
            )
        return LIBRARY[reference]
    path = Path(folder) / file
    kind = getattr(_module(path, _read(path) if source is None else source), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ValueError(
            f"recipe {reference!r}: {file} has no class {name} that derives from "
            "jrl.recipes.Recipe."
        )
    # Its own decorator is required: one inherited from `Recipe` does not cover the added fields.
    if "__dataclass_params__" not in vars(kind) or not is_dataclass(kind):
        raise ValueError(
            f"recipe {reference!r}: {name} is not a dataclass itself, so its fields would not be "
            "flags: write @dataclass(frozen=True) above it."
        )
    return kind


def reference_of(recipe: Recipe) -> str:
    """Reference by which `load_recipe` finds the recipe in the folder of a run, which contains its
    file.

    Raises:
      ValueError: for a class that is neither of the library nor from `load_recipe`.
    """
    kind = type(recipe)
    if kind in LIBRARY.values():
        return recipe.name
    if source_of(recipe) is None:
        raise ValueError(
            f"recipe {kind.__qualname__} of module {kind.__module__} could not be read again with "
            "its run: write it to a file of its own, and create it by "
            f'jrl.recipes.load.load_recipe("FILE.py:{kind.__qualname__}")().'
        )
    return f"{COPY}:{kind.__qualname__}"


def source_of(recipe: Recipe) -> bytes | None:
    """Content of the file of a user's recipe; None for one of the library's."""
    if type(recipe) in LIBRARY.values():
        return None
    return getattr(sys.modules[type(recipe).__module__], "__jrl_source__", None)


def read_recipe(reference: object, folder: Path | str) -> bytes | None:
    """Content of the file of a reference as of `load_recipe`; None for a name."""
    file, _, _ = str(reference).rpartition(":")
    return _read(Path(folder) / file) if file else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"recipe file {path} cannot be read: {error.strerror}.") from None


def _module(path: Path, content: bytes) -> ModuleType:
    """Runs the content of a file as a module, under a name that contains a hash of the content."""
    # By content: a file that was changed is another module, a copy in a run folder the same.
    name = f"jrl_recipe_{sha256(content).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        # Not by the import system, which would prefer compiled code in a __pycache__ beside it.
        module = load_source(content, str(path), name)
    except Exception as error:
        raise ValueError(
            f"recipe file {path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    module.__dict__["__jrl_source__"] = content
    return module
