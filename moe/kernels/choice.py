"""Which implementation of an operation runs."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
from jax import lax

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
        device, for tests. None is the kernel on CUDA devices where this process has GPUs that it is
        written for and nothing is in its way, else "plain".
      operation: named in the error.
      obstacle: what keeps the kernel from serving these operands, and the usual fix.

    Raises:
      ValueError: on another name, and on a kernel that is asked for and cannot serve.
    """
    if name is None and (obstacle is not None or not has_hopper()):
        name = "plain"
    if name is None:
        on_cuda = partial(kernel, interpreted=False)
        return lax.platform_dependent(*operands, cuda=on_cuda, default=plain)
    if name not in NAMES:
        raise ValueError(
            f"implementation={name!r} of {operation} is none of {', '.join(map(repr, NAMES))}; "
            "None picks."
        )
    if name == "plain":
        return plain(*operands)
    if obstacle is not None:
        raise ValueError(f"implementation={name!r} of {operation} cannot serve: {obstacle}")
    return kernel(*operands, interpreted=name == "interpreted")


@cache
def has_hopper() -> bool:
    """Whether this process has GPUs and all are NVIDIA's Hopper or later (capability 9.0)."""
    return capability() >= 9.0


@cache
def capability() -> float:
    """The least compute capability of this process's NVIDIA GPUs; 0 without any."""
    if jax.default_backend() != "gpu":
        return 0.0
    # Another vendor's is a name that is no number.
    found = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    return min(float(one) if one.replace(".", "", 1).isdigit() else 0.0 for one in found)
