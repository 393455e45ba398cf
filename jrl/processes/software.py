"""Software of a process: versions of packages, and hashes of the library's own source files.

Processes of one run compute the same values only with the same software.
"""

import json
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from jrl.processes.agreement import check_same, gather

PACKAGES = ("jrl-reasoning", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages that a run's values and files depend on."""
SOURCE_ROOT = Path(__file__).parents[2]
SOURCE_PACKAGES = ("jrl", "moe", "sharding")
HASH_LENGTH = 12


def installed_versions() -> dict[str, str]:
    """Versions of `PACKAGES`; jrl itself may be imported from a checkout."""
    return {package: _installed_version(package) for package in PACKAGES}


def source_hashes() -> dict[str, str]:
    """Hashes of the library's Python files, by path, for example jrl/train.py."""
    paths = (path for name in SOURCE_PACKAGES for path in (SOURCE_ROOT / name).rglob("*.py"))
    return {
        path.relative_to(SOURCE_ROOT).as_posix(): short_hash(path.read_bytes())
        for path in sorted(paths)
    }


def short_hash(content: bytes) -> str:
    """First digits of a SHA-256, by which people tell two contents apart."""
    return sha256(content).hexdigest()[:HASH_LENGTH]


def check_same_software() -> None:
    """Raises ValueError, in all processes, with the differences to process 0, unless all run the
    same versions of `PACKAGES` and the same source files."""
    software, hashes = installed_versions(), source_hashes()
    # Files are compared one by one only if they differ: then each is named.
    if len(set(gather(sha256(json.dumps(hashes).encode()).hexdigest()))) > 1:
        software |= hashes
    check_same(
        software,
        "runs other software than",
        "Install the same version of jrl and of its packages on every machine.",
    )


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
