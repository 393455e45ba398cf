"""Reinforcement learning on token sequences: the functions one imports, on nothing but jax.

Examples:
  >>> from jrl import gae, ppo_loss, value_loss
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl import losses
    from jrl.losses import *  # noqa: F403 - one list of public names, kept there

    __all__: list[str] = []
    __all__ += losses.__all__


def __getattr__(name: str) -> Any:
    """A public function, imported at its first use: the help of a command needs no JAX."""
    if name.startswith("__") and name != "__all__":  # Python asks for these of each module
        raise AttributeError(f"module 'jrl' has no attribute {name!r}")
    functions = import_module("jrl.losses")
    if name == "losses":
        return functions
    if name == "__all__" or name in functions.__all__:
        return getattr(functions, name)
    raise AttributeError(f"module 'jrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *import_module("jrl.losses").__all__]
