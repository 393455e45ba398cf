"""Selection of an implementation by name: reference implementation, kernel or interpreter."""

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
    hopper_alone: bool = False,
) -> Any:
    """Calls `plain`, or ``kernel(..., interpreted=bool)``, and returns its result.

    Args:
      name: "plain"; "mosaic", the kernel on a GPU; "interpreted", the kernel step by step on any
        device, for tests. None is "plain": a kernel runs only if it is named.
      operation: named in the error.
      obstacle: the reason why the kernel does not support these operands, and the usual fix.
      hopper_alone: the kernel uses Hopper's matrix units, which later GPUs lack.

    Raises:
      ValueError: on another name, and on a kernel that is named and does not support these operands
        or this process's GPUs.
    """
    if name is not None and name not in NAMES:
        raise ValueError(
            f"implementation={name!r} of {operation} is none of {', '.join(map(repr, NAMES))}; "
            'None is "plain".'
        )
    if name is None or name == "plain":
        return plain(*operands)
    if name == "mosaic" and obstacle is None:
        foreign = foreign_gpus(hopper_alone=hopper_alone)
        obstacle = None if foreign is None else f"{foreign}; use None."
    if obstacle is not None:
        raise ValueError(f"implementation={name!r} of {operation} cannot serve: {obstacle}")
    return kernel(*operands, interpreted=name == "interpreted")


def foreign_gpus(*, hopper_alone: bool) -> str | None:
    """The reason why a kernel does not run on this process's GPUs; None if it does, or if there are
    none and it is lowered for a GPU elsewhere."""
    found = capability()
    if not found or (found >= 9 and (found < 10 or not hopper_alone)):
        return None
    written = "Hopper's, 9.0" if hopper_alone else "Hopper's, 9.0, and later ones"
    return f"GPUs of capability {found}, and it is written for {written}"


@cache
def capability() -> float:
    """Lowest compute capability of this process's NVIDIA GPUs; 0 without any."""
    if jax.default_backend() != "gpu":
        return 0.0
    # On GPUs of another vendor it is a name, not a number.
    found = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    return min(float(one) if one.replace(".", "", 1).isdigit() else 0.0 for one in found)
