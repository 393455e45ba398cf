"""The planner on a run: predicted memory and time of its updates, and the automatic layout
(``--layout auto``), the fastest valid one as predicted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jrl.config.run import RunConfig
from jrl.recipes.base.recipe import Recipe
from jrl.trainer.setup.geometry import Geometry
from jrl.trainer.setup.memory import run_memory
from jrl.trainer.setup.network import check_overlaps, check_supported, with_dispatch
from jrl.trainer.setup.plan_inputs import planner_args
from jrl.trainer.setup.setup import Setup
from moe.architecture.feed_forward import can_drop
from moe.config import Model, ModelConfig
from moe.placement import specs
from moe.planner.cost import Cost, cost, library_system
from moe.planner.models import sizes_of
from moe.planner.search import MEMORY_FRACTION, broken_rule, chunks_of_a_stage, layouts
from sharding.costs.hardware import HARDWARE, Hardware, find_hardware
from sharding.folding import Layout, fold


def time_of_update(
    model: ModelConfig, geometry: Geometry, run: RunConfig, hardware: Hardware
) -> Cost:
    """Predicted seconds of one optimizer step on a mini-batch, with GEMMs as fast as in
    Megatron-Core and the overlap that the run requests (`moe.planner.communication`)."""
    return cost(*planner_args(model, geometry, run), hardware, library_system(hardware))


OVERLAPS = ("two_batch_overlap", "overlap_grad_reduce")
"""Settings that only overlap communication with computation."""


def times_with_overlap(
    model: ModelConfig, geometry: Geometry, run: RunConfig, hardware: Hardware
) -> dict[str, Cost]:
    """Predicted time of an update with each of `OVERLAPS` that the run does not use but could."""
    costs = {}
    for name in OVERLAPS:
        execution = replace(model.execution, **{name: True})
        overlapped = replace(model, execution=execution)
        if execution == model.execution or can_drop(overlapped):
            continue
        # The same check as for a run that requests it.
        try:
            check_overlaps(Model(overlapped, geometry.mesh), *geometry.overlap_units(run.packing))
        except ValueError:
            continue
        costs[name] = time_of_update(overlapped, geometry, run, hardware)
    return costs


@dataclass(frozen=True)
class Candidate:
    """Run on a valid layout, with its predicted time.

    Attributes:
      setup: of the run on the layout.
      seconds: seconds of its updates per sequence of a mini-batch, whose size may depend on the
        layout.
    """

    setup: Setup
    seconds: float

    @property
    def layout(self) -> Layout:
        return self.setup.mesh.layout


def choose_layout(setup: Setup, recipe: Recipe, num_devices: int) -> tuple[Layout, str]:
    """Fastest layout that fits, and the reason in one line.

    Args:
      setup: of the run on any layout.
      recipe: as requested, before its batches were divided over devices.
      num_devices: of the layout.

    Raises:
      ValueError: where the planner does not support the device, no layout is valid, or none fits.
    """
    hardware = detect_hardware()
    budget, options, rejection = MEMORY_FRACTION * hardware.memory, [], ""
    for layout in _valid_layouts(setup, num_devices, hardware):
        try:
            options.append(make_candidate(setup, recipe, layout, hardware))
        except ValueError as reason:
            rejection = rejection or f", {layout} for one: {str(reason).rstrip('.')}"
    if not options:
        raise ValueError(
            f"layout='auto': no layout of {num_devices} devices fits this run{rejection}. Choose "
            "another number of --devices, or batches that divide."
        )
    options.sort(key=lambda option: option.seconds)
    # The fastest first: layouts that do not fit are skipped until the first that does.
    sizes: dict[Layout, float] = {}
    for option in options:
        num_bytes = sizes[option.layout] = run_memory(option.setup).peak
        if num_bytes <= budget:
            break
    else:
        smallest = min(sizes, key=lambda layout: sizes[layout])
        raise ValueError(
            f"layout='auto': nothing fits on {num_devices} devices with {budget / 1e9:.3g} GB to "
            f"plan with: {smallest} needs least, {sizes[smallest] / 1e9:.3g} GB. Take more "
            "devices, --dtype bfloat16, --remat full or --fsdp."
        )
    rank = len(sizes) - 1
    skipped = f" but {rank}, which need too much memory" if rank else ""
    reason_line = (
        f"layout auto: {option.layout}, by the planner the fastest of {len(options)} layouts"
        f"{skipped}; {num_bytes / 1e9:.3g} GB of {budget / 1e9:.3g} on each {hardware.name} device"
    )
    if rank + 1 < len(options):
        next_option = options[rank + 1]
        slowdown = next_option.seconds / option.seconds - 1
        reason_line += f"; next {next_option.layout}, {slowdown:.0%} slower"
    return option.layout, reason_line


def detect_hardware() -> Hardware:
    """Planner's hardware description of the devices, for a CPU a laptop's; raises ValueError
    for an accelerator that it does not support."""
    device = jax.devices()[0]
    hardware = HARDWARE["laptop"] if device.platform == "cpu" else find_hardware(device.device_kind)
    if hardware is None:
        raise ValueError(
            f"layout='auto': the planner does not support {device.device_kind!r}, only "
            f"{', '.join(HARDWARE)}: give a layout, as in --layout dp{jax.device_count()}."
        )
    return hardware


def make_candidate(setup: Setup, recipe: Recipe, layout: Layout, hardware: Hardware) -> Candidate:
    """Run on a layout (`with_layout`), with its predicted time."""
    run_setup = with_layout(setup, recipe, layout)
    cost = time_of_update(run_setup.model, run_setup.geometry, run_setup.run, hardware)
    return Candidate(run_setup, cost.total / run_setup.recipe.mini_batch_size)


def with_layout(setup: Setup, recipe: Recipe, layout: Layout) -> Setup:
    """Setup of the run on another layout, with batches divided for it.

    Raises:
      ValueError: where the layout is not valid for the run.
    """
    mesh = fold(layout, jax.devices()[: layout.num_devices])
    specs(Model(setup.model, mesh))
    if setup.run.packing and layout.pp > 1:
        raise ValueError("packing=True is not supported with pp.")
    run = replace(setup.run, layout=str(layout))
    # As in a run on this layout: its mini-batch may differ, so time is compared per sequence.
    divided_recipe = recipe.divided(layout.dp).fitted(setup.response_length)
    model = with_dispatch(setup.model, run, mesh)
    check_supported(Model(model, mesh))
    new_setup = replace(setup, run=run, recipe=divided_recipe, mesh=mesh, model=model)
    new_setup = replace(new_setup, recipe=new_setup.geometry.with_micro_batch().recipe)
    new_setup.geometry.check()
    new_setup.geometry.slots(run.slots)
    check_overlaps(Model(new_setup.model, mesh), *new_setup.geometry.overlap_units(run.packing))
    _ = new_setup.frozen  # their own layouts, and their weights on this one
    return new_setup


def _valid_layouts(setup: Setup, num_devices: int, hardware: Hardware) -> Iterator[Layout]:
    """Valid layouts of the network, with every number of chunks per pipeline stage."""
    model, time = sizes_of(setup.model), setup.prompt_length + setup.response_length
    for layout in layouts(num_devices, hardware.domain, has_experts=model.num_experts > 0):
        # Divisibility of batches and positions is checked by `with_layout`: these values always
        # pass.
        if broken_rule(model, layout, layout.dp, time * 2 * layout.cp) is not None:
            continue
        for vpp in chunks_of_a_stage(model, layout):
            yield replace(layout, vpp=vpp)
