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
    hopper_alone: bool = False,
) -> Any:
    """The result of `plain`, or of ``kernel(..., interpreted=bool)``.

    Args:
      name: "plain"; "mosaic", the kernel on a GPU; "interpreted", the kernel step by step on any
        device, for tests. None is "plain": a kernel is asked for by its name.
      operation: named in the error.
      obstacle: what keeps the kernel from serving these operands, and the usual fix.
      hopper_alone: the kernel has Hopper's matrix units in it, which later GPUs have not.

    Raises:
      ValueError: on another name, and on a kernel that is asked for and cannot serve these operands
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
    """What keeps a kernel from this process's GPUs, if it has any: without, it is lowered for one
    that is elsewhere."""
    found = capability()
    if not found or (found >= 9 and (found < 10 or not hopper_alone)):
        return None
    written = "Hopper's, 9.0" if hopper_alone else "Hopper's, 9.0, and later ones"
    return f"GPUs of capability {found}, and it is written for {written}"


@cache
def capability() -> float:
    """The least compute capability of this process's NVIDIA GPUs; 0 without any."""
    if jax.default_backend() != "gpu":
        return 0.0
    # Another vendor's is a name that is no number.
    found = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    return min(float(one) if one.replace(".", "", 1).isdigit() else 0.0 for one in found)
