"""Memory of the devices of a mesh: all of it, and what is free for this process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from sharding.folding import FoldedMesh


def device_memory(mesh: FoldedMesh) -> int | None:
    """Memory of an accelerator in bytes, or a CPU device's share of the machine's; None if
    unknown."""
    devices = local_devices(mesh)
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    total = _physical_memory()
    return None if total is None else total // len(devices)


def free_memory(mesh: FoldedMesh) -> int | None:
    """Bytes that one device of the mesh has free for this process: of an accelerator what its
    allocator may still take, of a CPU device its share of `free_host_memory`; None if unknown."""
    devices = local_devices(mesh)
    stats = [device.memory_stats() for device in devices]
    if all(stats) and "bytes_limit" in stats[0]:
        return min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
    if devices[0].platform != "cpu":
        return None
    free = free_host_memory()
    return None if free is None else free // len(devices)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take of the machine: the least of the available memory, of
    what the limits of its control groups leave, and of its own limits (``ulimit -v``, ``-d``); None
    if the system says nothing.

    Args:
      root: folder with the system's ``proc`` and ``sys``.
    """
    # (limit, used)
    limits = [*_group_limits(root), *_process_limits(root)]
    free = [max(limit - used, 0) for limit, used in limits]
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        free.append(1024 * available)
    elif (total := _physical_memory()) is not None and not free:
        free.append(total)
    return min(free, default=None)


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits and used bytes of the control groups of this process and of all above them, in both
    versions of the interface. Cached files count as free: the kernel drops them first."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            files = "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = "total_inactive_file"
        else:
            continue
        group = mount / name.lstrip("/")
        # In a container the name may be the host's, and the mount be the group itself.
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                limit, used = (_number(folder / file) for file in names)
                if limit is not None and used is not None:
                    yield limit, used - (_field(folder / "memory.stat", files) or 0)


def _process_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits and used bytes of the address space and of the data of this process."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for limit, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            yield allowed, 1024 * (_field(root / "proc/self/status", name) or 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None if it is missing or "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _field(path: Path, name: str) -> int | None:
    """The first number of the line that begins with `name`."""
    for line in _lines(path):
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None


def local_devices(mesh: FoldedMesh) -> list[Any]:
    """Devices of the mesh in this process."""
    devices: Any = mesh.mesh.devices
    return [device for device in devices.flat if device.process_index == jax.process_index()]
