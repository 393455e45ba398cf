"""Recipes by name: those of the library, and a user's own from a Python file."""

import difflib
import sys
from dataclasses import is_dataclass
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from jrl.recipes import RECIPES, SUPERVISED, Recipe

COPY = "recipe.py"
"""What the file of a user's recipe is called in the folder of a run."""
LIBRARY: dict[str, type[Recipe]] = {**RECIPES, **SUPERVISED}
"""All that has a name of its own."""


def load_recipe(reference: str, folder: Path | str = ".") -> type[Recipe]:
    """The recipe of this name, or of a file: ``path/to/file.py:Name``.

    A file is run once for each content that it has; it may import what is installed, but no files
    beside it, which a run would not take along.

    Args:
      reference: a name of `RECIPES`, or a file and the name of a class in it.
      folder: that a relative path begins at.

    Raises:
      ValueError: where there is no such recipe, or the class is none.
    """
    file, _, name = reference.rpartition(":")
    if not file:
        if reference not in LIBRARY:
            near = difflib.get_close_matches(reference, LIBRARY, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"recipe {reference!r} is unknown: {hint}The recipes are {', '.join(LIBRARY)}; one "
                "of your own is path/to/file.py:Name."
            )
        return LIBRARY[reference]
    kind = getattr(_module(Path(folder) / file), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ValueError(
            f"recipe {reference!r}: {file} has no class {name} that derives from "
            "jrl.recipes.Recipe."
        )
    # Of its own: what is inherited from `Recipe` says nothing of the fields that it adds.
    if "__dataclass_params__" not in vars(kind) or not is_dataclass(kind):
        raise ValueError(
            f"recipe {reference!r}: {name} is no dataclass of its own, and its fields would be no "
            "flags: write @dataclass(frozen=True) above it."
        )
    return kind


def reference_of(recipe: Recipe) -> str:
    """What `load_recipe` finds the recipe by in the folder of a run, which has its file."""
    kind = type(recipe)
    if source_of(recipe) is None:
        return recipe.name
    return f"{COPY}:{kind.__qualname__}"


def source_of(recipe: Recipe) -> bytes | None:
    """The content of the file that a user's recipe is from, None for one of the library's."""
    if type(recipe) in LIBRARY.values():
        return None
    return getattr(sys.modules[type(recipe).__module__], "__jrl_source__", None)


def _module(path: Path) -> ModuleType:
    """The file as a module, under a name that tells contents apart."""
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
