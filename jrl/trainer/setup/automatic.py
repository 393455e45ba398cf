"""Automatic layout (``--layout auto``): the fastest valid layout of a run as predicted by the
planner."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jrl.recipes.base.recipe import Recipe
from jrl.trainer.setup.memory import DECODE_PARTS, GRADIENTS_SENT, LOGITS, STAGE_INPUTS, memory
from jrl.trainer.setup.network import check_overlaps, with_dispatch
from jrl.trainer.setup.predicted import memory_of_update, time_of_update
from jrl.trainer.setup.setup import Setup
from moe.counts.sizes import sizes_of
from moe.placement import specs
from sharding.folding import Layout, fold
from sharding.planner.hardware import HARDWARE, Hardware, of_kind
from sharding.planner.search import MEMORY_FRACTION, broken_rule, chunks_of_a_stage, layouts


@dataclass(frozen=True)
class Candidate:
    """Run on a valid layout, with its predicted time.

    Attributes:
      setup: of the run on the layout.
      seconds: of its updates per sequence of a mini-batch, whose size may depend on the layout.
    """

    setup: Setup
    seconds: float

    @property
    def layout(self) -> Layout:
        return self.setup.mesh.layout

    def bytes(self) -> float:
        """Peak memory of a device: persistent buffers, and the largest of the temporary ones of an
        update, a scoring pass, a gradient exchange and a decoding step."""
        own, stays = self.setup, memory(self.setup)
        update = memory_of_update(own.model, own.geometry, own.run)
        # The inputs of a stage's layers are part of an update's activations.
        stays.pop(STAGE_INPUTS, None)
        # Temporary buffers are not live at the same time: an update, a scoring pass, a gradient in
        # flight, a decoding step.
        turns = [stays.pop(name, 0) for name in (LOGITS, GRADIENTS_SENT, DECODE_PARTS)]
        at_work = max(update.activations + update.buffers, *turns)
        return sum(stays.values()) + at_work


def chosen_layout(setup: Setup, recipe: Recipe, num_devices: int) -> tuple[Layout, str]:
    """Fastest layout that fits, and the reason in one line.

    Args:
      setup: of the run on any layout.
      recipe: as requested, before its batches were divided over devices.
      num_devices: of the layout.

    Raises:
      ValueError: where the planner does not support the device, no layout is valid, or none fits.
    """
    hardware = hardware_at_hand()
    budget, possible, refusal = MEMORY_FRACTION * hardware.memory, [], ""
    for layout in _legal(setup, num_devices, hardware):
        try:
            possible.append(candidate(setup, recipe, layout, hardware))
        except ValueError as reason:
            refusal = refusal or f", {layout} for one: {str(reason).rstrip('.')}"
    if not possible:
        raise ValueError(
            f"layout='auto': no layout of {num_devices} devices can have this run{refusal}. Choose "
            "another number of --devices, or batches that divide."
        )
    too_large: dict[Layout, float] = {}
    # The fastest first: layouts that do not fit are skipped until the first that does.
    possible.sort(key=lambda one: one.seconds)
    for number, one in enumerate(possible):
        needs = one.bytes()
        if needs > budget:
            too_large[one.layout] = needs
            continue
        why = f"layout auto: {one.layout}, by the planner the fastest of {len(possible)} layouts"
        why += f" but {number}, which need too much memory" if too_large else ""
        why += f"; {needs / 1e9:.3g} GB of {budget / 1e9:.3g} on each {hardware.name} device"
        if number + 1 < len(possible):
            after = possible[number + 1]
            why += f"; next {after.layout}, {after.seconds / one.seconds - 1:.0%} slower"
        return one.layout, why
    least = min(too_large, key=lambda layout: too_large[layout])
    raise ValueError(
        f"layout='auto': nothing fits on {num_devices} devices with {budget / 1e9:.3g} GB to plan "
        f"with: {least} needs least, {too_large[least] / 1e9:.3g} GB. Take more devices, --dtype "
        "bfloat16, --remat full or --fsdp."
    )


def hardware_at_hand() -> Hardware:
    """Planner's hardware description of the devices; for a CPU that of a laptop.

    Raises:
      ValueError: for an accelerator that it does not support.
    """
    device = jax.devices()[0]
    known = HARDWARE["laptop"] if device.platform == "cpu" else of_kind(device.device_kind)
    if known is None:
        raise ValueError(
            f"layout='auto': the planner knows nothing of {device.device_kind!r}, only of "
            f"{', '.join(HARDWARE)}: give a layout, as in --layout dp{jax.device_count()}."
        )
    return known


def candidate(setup: Setup, recipe: Recipe, layout: Layout, hardware: Hardware) -> Candidate:
    """Run on a layout, with its predicted time.

    Raises:
      ValueError: where the layout is not valid for the run.
    """
    there = on_layout(setup, recipe, layout)
    takes = time_of_update(there.model, there.geometry, there.run, hardware)
    return Candidate(there, takes.total / there.recipe.mini_batch_size)


def on_layout(setup: Setup, recipe: Recipe, layout: Layout) -> Setup:
    """Setup of the run on another layout, with batches divided for it.

    Raises:
      ValueError: where the layout is not valid for the run.
    """
    mesh = fold(layout, jax.devices()[: layout.num_devices])
    specs(setup.model, mesh)
    if setup.run.packing and layout.pp > 1:
        raise ValueError("packing=True cannot be had with pp.")
    run = replace(setup.run, layout=str(layout))
    # As in a run on this layout: its mini-batch may differ, so time is compared per sequence.
    divided = recipe.divided(layout.dp).fitted(setup.response_length)
    model = with_dispatch(setup.model, run, mesh)
    there = replace(setup, run=run, recipe=divided, mesh=mesh, model=model)
    there = replace(there, recipe=there.geometry.with_micro_batch().recipe)
    there.geometry.check()
    there.geometry.slots(run.slots)
    check_overlaps(there.model, mesh, *there.geometry.overlapping(run.packing))
    return there


def _legal(setup: Setup, num_devices: int, hardware: Hardware) -> Iterator[Layout]:
    """Valid layouts of the network, with every number of chunks per pipeline stage."""
    model, time = sizes_of(setup.model), setup.prompt_length + setup.response_length
    for layout in layouts(num_devices, hardware.domain):
        # Divisibility of batches and positions is checked by `on_layout`: these values always pass.
        if broken_rule(model, layout, layout.dp, time * 2 * layout.cp) is not None:
            continue
        for vpp in chunks_of_a_stage(model, layout):
            yield replace(layout, vpp=vpp)
