"""Number of decoding slots of an evaluation, by the memory of the KV cache."""

import os
from typing import Any

import jax

from jrl.rollout.decoding.slots import ranks
from jrl.trainer.setup.geometry import MAX_SLOTS
from jrl.trainer.setup.memory import cache_bytes, weight_bytes
from jrl.trainer.setup.setup import Setup
from sharding.folding import FoldedMesh

CPU_CACHE_BYTES = 2 << 30
"""Bytes of the KV cache of a process on a CPU, whose memory other programs share."""


def evaluation_slots(setup: Setup, rows: int) -> tuple[int, str]:
    """Number of slots for the completions of an evaluation, and a line that describes it.

    The run's own number, if set; else as many as there are completions, at most `MAX_SLOTS`, whose
    KV cache fits: into `CPU_CACHE_BYTES`, or into half of the memory that the weights leave on an
    accelerator. It depends on the kind of machine, not on other processes there.

    Args:
      rows: total number of completions.

    Raises:
      ValueError: for a number that does not divide over the devices, or whose cache does not fit.
    """
    mesh, requested = setup.rollout_mesh, setup.run.slots
    unit, total = ranks(mesh) * setup.geometry.rollout_micro_batches, memory_of(mesh)
    columns = setup.prompt_length + setup.response_length

    def cache_bytes_of(slots: int) -> int:
        return cache_bytes(setup.model.without_adapters(), mesh, slots, columns)

    if requested is None:
        budget = _budget(setup, total)
        # Rounded up: a few slots may stay empty, and each rank has at least one.
        needed = -(-min(rows, MAX_SLOTS) // unit) * unit
        fitting = unit * max(1, budget // cache_bytes_of(unit))
        slots = min(needed, fitting)
        limited = slots < needed
    else:
        slots, limited = setup.geometry.slots(requested), False
        if total is not None and cache_bytes_of(slots) > total:
            raise ValueError(
                f"slots={slots} need a KV cache of {_size(cache_bytes_of(slots))} for rows of "
                f"{columns:,} tokens, and the device has {_size(total)}: lower --slots or "
                "--response-length."
            )
    fit_text = "as many as fit" if limited else "with"
    return slots, (
        f"{rows:,} completions of at most {setup.response_length:,} tokens, {slots:,} at a time "
        f"(--slots), {fit_text} a KV cache of {_size(cache_bytes_of(slots))}"
    )


def memory_of(mesh: FoldedMesh) -> int | None:
    """Memory of an accelerator in bytes, or a CPU device's share of the machine's; None if
    unknown."""
    devices = _devices(mesh)
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    except (AttributeError, OSError, ValueError):
        return None


def _budget(setup: Setup, total: int | None) -> int:
    mesh = setup.rollout_mesh
    devices = _devices(mesh)
    if total is None or devices[0].platform == "cpu":
        return CPU_CACHE_BYTES // len(devices)
    # Twice: as loaded, and unstacked by layers for decoding.
    free = total - 2 * weight_bytes(setup.model.without_adapters(), mesh)
    return max(free // 2, 0)


def _devices(mesh: FoldedMesh) -> list[Any]:
    """Devices of the mesh in this process."""
    devices: Any = mesh.mesh.devices
    return [device for device in devices.flat if device.process_index == jax.process_index()]


def _size(number: int) -> str:
    return f"{number / 2**30:.2g} GiB" if number >= 2**29 else f"{number / 2**20:.3g} MiB"
