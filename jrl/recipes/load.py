"""Recipes by name: those of the library, and a user's own from a Python file."""

import difflib
import sys
from dataclasses import is_dataclass
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from jrl.recipes import RECIPES, Recipe, Sft

COPY = "recipe.py"
"""File name of a user's recipe in the folder of a run."""
LIBRARY: dict[str, type[Recipe]] = {**RECIPES, "sft": Sft}
"""All recipes that are loaded by name, with supervised fine-tuning."""
LONG_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{NON-BREAKING HYPHEN}", "\N{MINUS SIGN}")
"""Characters that pages and word processors write for hyphens."""


def load_recipe(reference: str, folder: Path | str = ".") -> type[Recipe]:
    """Loads a recipe class by name, or from a file: ``path/to/file.py:Name``.

    A file is executed once per content. It may import installed packages, but no files of its own
    folder, which are not copied into a run.

    Args:
      reference: a name of `LIBRARY`, or a file and the name of a class in it.
      folder: base of a relative path.

    Raises:
      ValueError: where there is no such recipe, or the class is not one.
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
    kind = getattr(_module(Path(folder) / file), name, None)
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


def _module(path: Path) -> ModuleType:
    """Imports the file as a module, under a name that contains a hash of its content."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"recipe file {path} cannot be read: {error.strerror}.") from None
    # By content: a file that was changed is another module, a copy in a run folder the same.
    name = f"jrl_recipe_{sha256(content).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__dict__["__jrl_source__"] = content
    # Annotations of dataclasses are looked up in the module of this name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"recipe file {path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    return module
