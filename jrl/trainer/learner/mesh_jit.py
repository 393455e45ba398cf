"""Jitted functions with the compiler options of their mesh (`sharding.compiler_options`)."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from sharding.compiler_options import compiler_options
from sharding.folding import FoldedMesh

Params = ParamSpec("Params")
Result = TypeVar("Result")


class MeshJit(Generic[Params, Result]):
    """Jitted function of an objective, whose mesh determines the compiler options.

    Args:
      function: its first argument is static and has a `mesh`.
      least_effort: of the compiler, see `sharding.compiler_options.LEAST_EFFORT`.
      options: of `jax.jit`.
    """

    def __init__(
        self, function: Callable[Params, Result], *, least_effort: bool = False, **options: Any
    ):
        self._function, self._least_effort, self._options = function, least_effort, options
        self._jitted: dict[tuple[tuple[str, Any], ...], Any] = {}
        self.__doc__ = function.__doc__

    def jit_for(self, mesh: FoldedMesh) -> Any:
        """Jitted function for a mesh; the same for meshes with the same options."""
        # Options belong to `jax.jit` and not to a call, so there is one function for each set.
        compiler_settings = compiler_options(mesh, least_effort=self._least_effort)
        key = tuple(sorted(compiler_settings.items()))
        if key not in self._jitted:
            self._jitted[key] = jax.jit(
                self._function, compiler_options=compiler_settings or None, **self._options
            )
        return self._jitted[key]

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        return self.jit_for(_mesh_of(args))(*args, **kwargs)

    def lower(self, *args: Params.args, **kwargs: Params.kwargs) -> Any:
        """Lowers the function, as `jax.jit`'s `lower`."""
        return self.jit_for(_mesh_of(args)).lower(*args, **kwargs)

    def trace(self, *args: Params.args, **kwargs: Params.kwargs) -> Any:
        """Traces the function, as `jax.jit`'s `trace`."""
        return self.jit_for(_mesh_of(args)).trace(*args, **kwargs)


def _mesh_of(args: tuple[Any, ...]) -> FoldedMesh:
    return args[0].mesh
