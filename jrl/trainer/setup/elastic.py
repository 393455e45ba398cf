"""Elastic training: the layout of a run on fewer processes, with a smaller dp."""

from collections.abc import Mapping
from dataclasses import replace

import jax

from jrl.checks import flag
from jrl.config.run import RunConfig
from jrl.faults.guard import Restart
from jrl.recipes.base.recipe import Recipe
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.setup.setup import Setup, build_setup, check_layout
from moe.config import ModelConfig
from sharding.folding import Layout, fold
from sharding.folding.layout import divisors


def build_elastic_setup(
    run: RunConfig,
    recipe: Recipe,
    tokenizer: Tokenizer | None = None,
    model: ModelConfig | None = None,
    code: Mapping[str, bytes] | None = None,
) -> Setup:
    """`build_setup` on the devices that there are.

    If the layout has more and `min_processes` allows it, dp is smaller and the rest as in
    `restart_without`, on all devices of all processes.

    Args:
      tokenizer, model, code: as of `build_setup`.

    Raises:
      ValueError: for any invalid setting, and if there are too few processes, or the smaller
        layout is not legal.
    """
    layout, num_devices = Layout.parse(run.layout), jax.device_count()
    if run.min_processes is None or num_devices >= layout.num_devices:
        return build_setup(run, recipe, tokenizer, model, code)
    if jax.process_count() < run.min_processes:
        raise ValueError(
            f"layout {run.layout!r} needs {layout.num_devices} devices and there are {num_devices} "
            f"in {jax.process_count()} processes; a smaller one needs "
            f"min_processes={run.min_processes} of them."
        )
    rows = max(recipe.micro_batch_size // layout.dp, 1)
    smaller = _on_fewer_devices(run, num_devices)
    setup = build_setup(smaller, replace(recipe, micro_batch=None), tokenizer, model, code)
    setup = _with_micro_batch(setup, rows)
    try:
        check_layout(setup)
    except BaseException:
        setup.task.close()
        raise
    print(
        f"layout {smaller.layout!r} in place of {run.layout!r}: there are {num_devices} of "
        f"{layout.num_devices} devices"
    )
    return setup


def restart_without(setup: Setup, process: int, num_processes: int, minimum: int) -> Restart:
    """Restart of a run after the loss of one of its processes.

    tp, cp, pp, ep and etp stay as they are. With n of the processes ``dp = n x devices of a process
    / (tp x cp x pp)``; n is the greatest for which the layout is legal and the mini-batch divides
    over dp. The micro-batch has at most as many rows per device as before, and `slots` as many, if
    they were given. Trained weights and batches are the same up to the order of sums.

    Args:
      process: index of the process that is left out.
      num_processes: of the run, which all have equally many devices.
      minimum: fewest processes of the restart.

    Raises:
      ValueError: with the reason if there is no legal layout.
    """
    remaining = [index for index in range(num_processes) if index != process]
    if len(remaining) < minimum:
        raise ValueError(
            f"it would leave {len(remaining)} processes, and min_processes={minimum} are needed."
        )
    per_process = setup.mesh.layout.num_devices // num_processes
    reasons = []
    for count in range(len(remaining), minimum - 1, -1):
        num_devices = count * per_process
        try:
            run = _on_fewer_devices(setup.run, num_devices)
            mesh = fold(Layout.parse(run.layout), jax.devices()[:num_devices])
            smaller = _with_micro_batch(replace(setup, run=run, mesh=mesh), setup.geometry.rows)
            check_layout(smaller)
        except ValueError as error:
            reasons.append(f"on {count} processes {error}")
            continue
        return Restart(tuple(remaining[:count]), _flags(setup, smaller), run.layout)
    raise ValueError(f"no layout with a smaller dp is legal: {' '.join(reasons)}")


def _on_fewer_devices(run: RunConfig, num_devices: int) -> RunConfig:
    """Settings of a run on so many devices, with a smaller dp, and as many slots on each; raises
    ValueError if the devices do not divide by the other axes."""
    rollout_layout, slots, before = run.rollout_layout, run.slots, Layout.parse(run.layout)
    if rollout_layout is not None:
        rollout_layout = _with_devices(rollout_layout, num_devices)
    return replace(
        run,
        layout=_with_devices(run.layout, num_devices),
        rollout_layout=rollout_layout,
        devices=None if run.devices is None else num_devices,
        slots=None if slots is None else slots * num_devices // before.num_devices,
    )


def _with_devices(text: str, num_devices: int) -> str:
    """The layout with the dp of so many devices."""
    layout = Layout.parse(text)
    unit = layout.tp * layout.cp * layout.pp
    if num_devices % unit:
        raise ValueError(
            f"{num_devices} devices do not divide by tp x cp x pp = {unit} of {str(layout)!r}."
        )
    return str(replace(layout, dp=num_devices // unit))


def _with_micro_batch(setup: Setup, rows: int) -> Setup:
    """With the largest micro-batch of at most so many rows per device, or else the smallest."""
    recipe, dp = setup.recipe, setup.mesh.layout.dp
    sizes = [size for size in divisors(recipe.mini_batch_size) if size % dp == 0]
    fitting = [size for size in sizes if size <= rows * dp]
    geometry = setup.geometry.with_first_valid((*reversed(fitting), *sizes[len(fitting) :]))
    return replace(setup, recipe=geometry.recipe)


def _flags(setup: Setup, smaller: Setup) -> tuple[str, ...]:
    """Flags of the training program for the smaller run."""
    flags = ["--layout", smaller.run.layout]
    for name in ("rollout_layout", "devices", "slots"):
        value = getattr(smaller.run, name)
        if value != getattr(setup.run, name):
            flags += [flag(name), str(value)]
    return (*flags, "--micro-batch", str(smaller.recipe.micro_batch_size))
