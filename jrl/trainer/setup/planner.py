"""The planner on a run: predicted memory and time of its updates, and the automatic layout
(``--layout auto``), the fastest valid one as predicted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jrl.config.run import RunConfig
from jrl.recipes.base.recipe import Recipe
from jrl.trainer.learner.learner import keeps_masters
from jrl.trainer.setup.geometry import Geometry
from jrl.trainer.setup.memory import (
    DECODE_PARTIALS,
    GRADIENTS_SENT,
    LOGITS,
    STAGE_INPUTS,
    memory,
    state_bytes_per_parameter,
)
from jrl.trainer.setup.network import check_overlaps, check_supported, with_dispatch
from jrl.trainer.setup.setup import Setup
from moe.architecture.feed_forward import can_drop
from moe.attention.context_parallel import context_of
from moe.attention.core import MAX_PLAIN_SCORES_ACCELERATOR, MAX_PLAIN_SCORES_CPU
from moe.config import ModelConfig
from moe.counts import sizes_of
from moe.execution import TWO_LEVELS
from moe.experts.dispatch.cost import hardware_of
from moe.placement import specs
from sharding.costs.hardware import HARDWARE, Hardware, find_hardware
from sharding.folding import FoldedMesh, Layout, fold
from sharding.planner.cost import Cost, cost
from sharding.planner.memory import Memory
from sharding.planner.memory import memory as planned_memory
from sharding.planner.method import Batch, Method
from sharding.planner.models import ModelSizes
from sharding.planner.programs import library_system
from sharding.planner.search import MEMORY_FRACTION, broken_rule, chunks_of_a_stage, layouts


def memory_of_update(model: ModelConfig, geometry: Geometry, run: RunConfig) -> Memory:
    """Predicted bytes on one device during an update of the policy (`sharding.planner.memory`).

    Sequences count with their full length; where completions share a prompt it is less.
    """
    return planned_memory(*_planner_args(model, geometry, run), model.execution.vocab_chunk)


def time_of_update(
    model: ModelConfig, geometry: Geometry, run: RunConfig, hardware: Hardware
) -> Cost:
    """Predicted seconds of one optimizer step on a mini-batch, with GEMMs as fast as in
    Megatron-Core and the overlap that the run requests (`sharding.planner.communication`)."""
    return cost(*_planner_args(model, geometry, run), hardware, library_system(hardware))


def _planner_args(
    model: ModelConfig, geometry: Geometry, run: RunConfig
) -> tuple[ModelSizes, Layout, Batch, Method]:
    """Arguments of the planner for an update."""
    batch, mesh = batch_of(geometry), geometry.mesh
    method = method_of(model, mesh, batch, run)
    optimizer = replace(geometry.recipe.policy_optimizer, mu_dtype=run.mu_dtype)
    # The planner has the state of AdamW.
    if optimizer.name != "adamw" or optimizer.transformation is not None:
        method = replace(method, state_bytes=state_bytes_per_parameter(optimizer, model, mesh))
    return sizes_of(model), mesh.layout, batch, method


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
            check_overlaps(overlapped, geometry.mesh, *geometry.overlap_units(run.packing))
        except ValueError:
            continue
        costs[name] = time_of_update(overlapped, geometry, run, hardware)
    return costs


def batch_of(geometry: Geometry) -> Batch:
    """Planner's batch sizes: mini-batch, row length and micro-batch per device."""
    mini = geometry.recipe.mini_batch_size
    # The maximum length of a row, as the lengths of responses are unknown.
    time = geometry.prompt_length + geometry.response_length
    return Batch(mini, time, mini // geometry.num_micro_batches // geometry.mesh.layout.dp)


def method_of(config: ModelConfig, mesh: FoldedMesh, batch: Batch, run: RunConfig) -> Method:
    """Planner's execution settings: the network's, and the run's dtypes of gradients and
    moments."""
    execution = config.execution
    server_devices = execution.server_devices
    if server_devices is None and execution.dispatch in TWO_LEVELS:
        server_devices = hardware_of(mesh).domain
    return Method(
        # None if no token is dispatched.
        dispatch=execution.dispatch or "all_gather",
        context=context_of(config, mesh),
        remat=execution.remat,
        fsdp=execution.fsdp,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        storage="bfloat16" if keeps_masters(config) else "float32",
        even=execution.buffer_factor is not None,
        buffer_factor=execution.buffer_factor,
        activation_wire=execution.activation_wire,
        expert_chunks=execution.expert_chunks,
        two_batch_overlap=execution.two_batch_overlap,
        overlap_grad_reduce=execution.overlap_grad_reduce,
        gradient_wire=run.gradient_wire,
        mu_dtype=run.mu_dtype,
        attention=attention_of(config, mesh, batch),
        duplicates_experts=mesh.platform == "cpu",
        server_devices=server_devices,
    )


def attention_of(config: ModelConfig, mesh: FoldedMesh, batch: Batch) -> str | None:
    """Attention implementation that stores scores in memory, for `Method.attention`: the one that
    `moe.attention.core` would choose for a micro-batch; None for a kernel."""
    implementation = config.execution.attention
    if implementation is not None:
        return {"plain": "plain", "xla": "plain", "blocked": "blocked"}.get(implementation)
    # GPUs use cuDNN; devices of an unknown platform are assumed to be GPUs.
    if mesh.platform in ("gpu", None) and config.dtype == "bfloat16":
        return None
    layout = mesh.layout
    # Between layers tokens are sharded over tp; in attention a rank has all tokens and some heads.
    queries = batch.local_tokens(layout) * layout.tp
    scores = config.num_heads // layout.tp * queries * batch.time
    max_scores = MAX_PLAIN_SCORES_CPU if mesh.platform == "cpu" else MAX_PLAIN_SCORES_ACCELERATOR
    return "blocked" if scores > max_scores else "plain"


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

    def bytes(self) -> float:
        """Peak memory of a device: persistent buffers, and the largest of the temporary ones of an
        update, a scoring pass, a gradient exchange and a decoding step."""
        setup, buffers = self.setup, memory(self.setup)
        update = memory_of_update(setup.model, setup.geometry, setup.run)
        # The inputs of a stage's layers are part of an update's activations.
        buffers.pop(STAGE_INPUTS, None)
        # Temporary buffers are not live at the same time.
        temporary = [buffers.pop(name, 0) for name in (LOGITS, GRADIENTS_SENT, DECODE_PARTIALS)]
        peak_temporary = max(update.activations + update.buffers, *temporary)
        return sum(buffers.values()) + peak_temporary


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
        num_bytes = sizes[option.layout] = option.bytes()
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
    specs(setup.model, mesh)
    if setup.run.packing and layout.pp > 1:
        raise ValueError("packing=True is not supported with pp.")
    run = replace(setup.run, layout=str(layout))
    # As in a run on this layout: its mini-batch may differ, so time is compared per sequence.
    divided_recipe = recipe.divided(layout.dp).fitted(setup.response_length)
    model = with_dispatch(setup.model, run, mesh)
    check_supported(model, mesh)
    new_setup = replace(setup, run=run, recipe=divided_recipe, mesh=mesh, model=model)
    new_setup = replace(new_setup, recipe=new_setup.geometry.with_micro_batch().recipe)
    new_setup.geometry.check()
    new_setup.geometry.slots(run.slots)
    check_overlaps(new_setup.model, mesh, *new_setup.geometry.overlap_units(run.packing))
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
