"""Devices that an implementation is selected for: those of a mesh, present or absent."""

from typing import Any, NamedTuple

import jax

from moe.kernels.choice import capability
from sharding.folding import FoldedMesh

HOPPER = 9.0, 10.0
"""Compute capabilities of GPUs with Hopper's matrix units, the second excluded."""


class Devices(NamedTuple):
    """Platform and generation of devices.

    Attributes:
      platform: "cpu", "gpu", "tpu", or None if it is not known.
      capability: lowest compute capability of NVIDIA GPUs; 0 for others, and where it is not known.
    """

    platform: str | None
    capability: float

    @property
    def is_hopper(self) -> bool:
        return self.platform == "gpu" and HOPPER[0] <= self.capability < HOPPER[1]


def devices_of(mesh: FoldedMesh | None = None) -> Devices:
    """Devices of a mesh; those of this process for None, and for the capability of an abstract
    mesh."""
    if mesh is None:
        platform, devices = jax.default_backend(), ()
    else:
        platform, devices = mesh.platform, _mesh_devices(mesh)
    if platform != "gpu":
        return Devices(platform, 0.0)
    # On GPUs of another vendor it is a name, not a number.
    texts = [str(getattr(device, "compute_capability", "")) for device in devices]
    numbers = [float(text) if text.replace(".", "", 1).isdigit() else 0.0 for text in texts]
    return Devices(platform, min(numbers) if numbers else capability())


def _mesh_devices(mesh: FoldedMesh) -> tuple[Any, ...]:
    return tuple(mesh.mesh.devices.flat) if isinstance(mesh.mesh, jax.sharding.Mesh) else ()
