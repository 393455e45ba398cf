"""Which implementation of an operation runs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

NAMES = ("mosaic", "plain", "interpreted")


def by_name(
    name: str | None,
    plain: Callable[..., Any],
    kernel: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    operation: str,
    obstacle: str | None = None,
) -> Any:
    """The result of `plain`, or of ``kernel(..., interpreted=bool)``.

    Args:
      name: "plain"; "mosaic", the kernel on a GPU; "interpreted", the kernel step by step on any
        device, for tests. None is "plain": a kernel is asked for by its name.
      operation: named in the error.
      obstacle: what keeps the kernel from serving these operands, and the usual fix.

    Raises:
      ValueError: on another name, and on a kernel that is asked for and cannot serve.
    """
    if name is not None and name not in NAMES:
        raise ValueError(
            f"implementation={name!r} of {operation} is none of {', '.join(map(repr, NAMES))}; "
            'None is "plain".'
        )
    if name is None or name == "plain":
        return plain(*operands)
    if obstacle is not None:
        raise ValueError(f"implementation={name!r} of {operation} cannot serve: {obstacle}")
    return kernel(*operands, interpreted=name == "interpreted")


@cache
def capability() -> float:
    """The least compute capability of this process's NVIDIA GPUs; 0 without any."""
    if jax.default_backend() != "gpu":
        return 0.0
    # Another vendor's is a name that is no number.
    found = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    return min(float(one) if one.replace(".", "", 1).isdigit() else 0.0 for one in found)
