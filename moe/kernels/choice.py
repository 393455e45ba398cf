"""Selection of an implementation by name (reference implementation, kernel or interpreter), and the
devices that it is for, present or absent."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from sharding.folding import FoldedMesh

NAMES = ("mosaic", "plain", "interpreted")
HALF_PRECISION = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
"""Dtypes that the matrix units multiply."""

HOPPER = 9.0, 10.0
"""Compute capabilities of GPUs with Hopper's matrix units, the second excluded."""


def call_implementation(
    name: str | None,
    plain: Callable[..., Any],
    kernel: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    operation: str,
    obstacle: str | None = None,
    hopper_only: bool = False,
) -> Any:
    """Calls `plain`, or ``kernel(..., interpreted=bool)``, and returns its result.

    Args:
      name: "plain"; "mosaic", the kernel on a GPU; "interpreted", the kernel step by step on any
        device, for tests. None is "plain": a kernel runs only if it is named.
      operation: named in the error.
      obstacle: the reason why the kernel does not support these operands, and the usual fix.
      hopper_only: the kernel uses Hopper's matrix units, which later GPUs lack.

    Raises:
      ValueError: on another name, and on a kernel that is named and does not support these operands
        or this process's GPUs.
    """
    if name is not None and name not in NAMES:
        raise ValueError(
            f"implementation={name!r} of {operation} is not known: choose among "
            f'{", ".join(map(repr, NAMES))}, or None for "plain".'
        )
    if name is None or name == "plain":
        return plain(*operands)
    if name == "mosaic" and obstacle is None:
        foreign = foreign_gpus(hopper_only=hopper_only)
        obstacle = None if foreign is None else f"{foreign}; use None."
    if obstacle is not None:
        raise ValueError(f"implementation={name!r} of {operation} is not supported: {obstacle}")
    return kernel(*operands, interpreted=name == "interpreted")


def foreign_gpus(*, hopper_only: bool) -> str | None:
    """The reason why a kernel does not run on this process's GPUs; None if it does, or if there are
    none and it is lowered for a GPU elsewhere."""
    lowest = capability()
    if not lowest or (lowest >= 9 and (lowest < 10 or not hopper_only)):
        return None
    supported = "9.0, Hopper" if hopper_only else "9.0, Hopper, or later"
    return f"GPUs of capability {lowest} (needs {supported})"


@cache
def capability() -> float:
    """Lowest compute capability of this process's NVIDIA GPUs; 0 if it has none."""
    return _lowest_capability(jax.local_devices()) if jax.default_backend() == "gpu" else 0.0


def _lowest_capability(devices: Iterable[Any]) -> float:
    # On GPUs of another vendor it is a name, not a number.
    texts = [str(getattr(device, "compute_capability", "")) for device in devices]
    return min(float(text) if text.replace(".", "", 1).isdigit() else 0.0 for text in texts)


def unsupported_dtype(name: str, dtype: DTypeLike) -> str | None:
    """The reason why a dtype is unsupported: the matrix units do not multiply it; None if they
    do."""
    if jnp.dtype(dtype) in HALF_PRECISION:
        return None
    return f"{name} of {dtype} (needs bfloat16 or float16)"


def unsupported_dtypes(names: str, *arrays: Array) -> str | None:
    """The reason why arrays are unsupported: they are not all of one half precision; None if they
    are."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) == 1 and dtypes <= {*HALF_PRECISION}:
        return None
    listed = ", ".join(str(x.dtype) for x in arrays)
    return f"{names} of {listed} (needs all bfloat16 or all float16)"


class Devices(NamedTuple):
    """Platform and generation of devices.

    Attributes:
      platform: "cpu", "gpu", "tpu", or None if it is not known.
      capability: lowest compute capability of NVIDIA GPUs; 0 for others, and if unknown.
    """

    platform: str | None
    capability: float

    @property
    def is_hopper(self) -> bool:
        return self.platform == "gpu" and HOPPER[0] <= self.capability < HOPPER[1]


def devices_of(mesh: FoldedMesh | None = None) -> Devices:
    """Devices of a mesh. For None they are this process's devices, as is the capability of an
    abstract mesh."""
    if mesh is None:
        platform, devices = jax.default_backend(), ()
    else:
        platform, devices = mesh.platform, _mesh_devices(mesh)
    if platform != "gpu":
        return Devices(platform, 0.0)
    return Devices(platform, _lowest_capability(devices) if devices else capability())


def _mesh_devices(mesh: FoldedMesh) -> tuple[Any, ...]:
    return tuple(mesh.mesh.devices.flat) if isinstance(mesh.mesh, jax.sharding.Mesh) else ()
