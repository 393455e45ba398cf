"""Elastic restart: the layout of a run on fewer processes, with a smaller dp."""

from dataclasses import replace

import jax

from jrl.faults.drain import Restart
from jrl.rollout.decoding.slots import ranks
from jrl.trainer.setup.setup import Setup, check_layout
from sharding.folding import Layout, fold
from sharding.folding.layout import divisors


def restart_without(setup: Setup, process: int, num_processes: int, minimum: int) -> Restart:
    """Restart of a run without one of its processes.

    tp, cp, pp, ep and etp stay as they are. With n of the processes ``dp = n x devices of a process
    / (tp x cp x pp)``; n is the greatest for which the layout is legal and the mini-batch divides
    over dp. The micro-batch has at most as many rows per device as before, and `slots` as many, if
    they were given. Trained weights and batches are the same up to the order of sums.

    Args:
      process: index of the process that is left out.
      num_processes: of the run, which all have equally many devices.
      minimum: fewest processes of the restart.

    Raises:
      ValueError: with the reason where there is no legal layout.
    """
    remaining = [index for index in range(num_processes) if index != process]
    if len(remaining) < minimum:
        raise ValueError(
            f"it would leave {len(remaining)} processes, and min_processes={minimum} are needed."
        )
    per_process = setup.mesh.layout.num_devices // num_processes
    reasons = []
    for count in range(len(remaining), minimum - 1, -1):
        try:
            smaller = _on_devices(setup, count * per_process)
        except ValueError as error:
            reasons.append(f"on {count} processes {error}")
            continue
        flags = _flags(setup, smaller)
        return Restart(tuple(remaining[:count]), flags, smaller.run.layout)
    raise ValueError(f"no layout with a smaller dp is legal: {' '.join(reasons)}")


def _on_devices(setup: Setup, num_devices: int) -> Setup:
    """The run on its first devices, with a smaller dp.

    Raises:
      ValueError: where that is not legal.
    """
    run = setup.run
    layout = _with_devices(setup.mesh.layout, num_devices)
    rollout_layout = run.rollout_layout
    if rollout_layout is not None:
        rollout_layout = str(_with_devices(Layout.parse(rollout_layout), num_devices))
    smaller = replace(
        setup,
        run=replace(
            run,
            layout=str(layout),
            rollout_layout=rollout_layout,
            devices=None if run.devices is None else num_devices,
        ),
        mesh=fold(layout, jax.devices()[:num_devices]),
    )
    if run.slots is not None:
        slots = run.slots // ranks(setup.rollout_mesh) * ranks(smaller.rollout_mesh)
        smaller = replace(smaller, run=replace(smaller.run, slots=slots))
    smaller = _with_micro_batch(smaller, setup.geometry.rows)
    check_layout(smaller)
    return smaller


def _with_devices(layout: Layout, num_devices: int) -> Layout:
    """The layout with the dp of so many devices."""
    unit = layout.tp * layout.cp * layout.pp
    if num_devices % unit:
        raise ValueError(f"{num_devices} devices do not divide by tp x cp x pp = {unit}.")
    return replace(layout, dp=num_devices // unit)


def _with_micro_batch(setup: Setup, rows: int) -> Setup:
    """With the largest micro-batch of at most so many rows per device, or else the smallest."""
    recipe, dp = setup.recipe, setup.mesh.layout.dp
    sizes = [size for size in divisors(recipe.mini_batch_size) if size % dp == 0]
    fitting = [size for size in sizes if size <= rows * dp]
    for size in (*reversed(fitting), *sizes[len(fitting) :]):
        candidate = replace(setup, recipe=replace(recipe, micro_batch=size))
        try:
            candidate.geometry.check()
        except ValueError:
            continue
        return candidate
    return setup  # whose check gives the reason


def _flags(setup: Setup, smaller: Setup) -> tuple[str, ...]:
    """Flags of the training program for the smaller run."""
    flags = ["--layout", smaller.run.layout]
    for name in ("rollout_layout", "devices", "slots"):
        value = getattr(smaller.run, name)
        if value != getattr(setup.run, name):
            flags += ["--" + name.replace("_", "-"), str(value)]
    return (*flags, "--micro-batch", str(smaller.recipe.micro_batch_size))
