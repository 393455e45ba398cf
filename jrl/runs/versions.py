"""Versions of the software that a run was made with: ``versions.json`` in its folder."""

import json
import platform
from importlib import metadata

from jrl.runs import records
from jrl.runs.folder import RunFolder

PACKAGES = ("jrl-reasoning", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def write(folder: RunFolder, device: str) -> None:
    """Keep the versions of the process that writes the run, each time it starts or resumes.

    Args:
      device: the kind of accelerator, and how many.
    """
    records.replace(
        folder.versions_path, (json.dumps(_collect_versions(device), indent=2) + "\n").encode()
    )


def read(folder: RunFolder) -> dict[str, str]:
    """The versions of a run; none for one that was made before they were kept."""
    if not folder.versions_path.exists():
        return {}
    versions = records.read_object(folder.versions_path, "delete it, or put it back as it was")
    return {str(name): str(version) for name, version in versions.items()}


def _collect_versions(device: str) -> dict[str, str]:
    installed = {dist: _version(dist) for dist in PACKAGES}
    return {
        "python": platform.python_version(),
        **installed,
        "platform": platform.platform(terse=True),
        "devices": device,
    }


def _version(package: str) -> str:
    """Of an installed package; jrl itself may be imported from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
