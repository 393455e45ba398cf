"""Planner's prediction of a run's updates: activation memory and time."""

from dataclasses import replace

from jrl.config.run import RunConfig
from jrl.trainer.learner.masters import keeps_masters
from jrl.trainer.setup.geometry import Geometry
from jrl.trainer.setup.network import check_overlaps
from moe.architecture.feed_forward import can_drop
from moe.attention.context_parallel import context_of
from moe.attention.core import MAX_PLAIN_SCORES_ACCELERATOR, MAX_PLAIN_SCORES_CPU
from moe.config import ModelConfig
from moe.counts.sizes import sizes_of
from sharding.folding import FoldedMesh, Layout
from sharding.planner.cost import Cost, cost
from sharding.planner.hardware import Hardware
from sharding.planner.memory import Memory, memory
from sharding.planner.method import Batch, Method
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.validation.calibration import library_system


def memory_of_update(model: ModelConfig, geometry: Geometry, run: RunConfig) -> Memory:
    """Predicted bytes on one device during an update of the policy (`sharding.planner.memory`).

    Sequences count with their full length; where completions share a prompt it is less.
    """
    return memory(*_planner_args(model, geometry, run), model.execution.vocab_chunk)


def time_of_update(
    model: ModelConfig, geometry: Geometry, run: RunConfig, hardware: Hardware
) -> Cost:
    """Predicted seconds of one optimizer step on a mini-batch, with GEMMs as fast as those of
    Megatron-Core and the overlap that the run requests (`sharding.planner.overlap`)."""
    return cost(*_planner_args(model, geometry, run), hardware, library_system(hardware))


def _planner_args(
    model: ModelConfig, geometry: Geometry, run: RunConfig
) -> tuple[ModelSizes, Layout, Batch, Method]:
    """Arguments of the planner for an update."""
    batch = batch_of(geometry)
    return sizes_of(model), geometry.mesh.layout, batch, method_of(model, geometry.mesh, batch, run)


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
    """Planner's execution settings: those of the network, and the run's dtypes of gradients and
    moments."""
    execution = config.execution
    return Method(
        # None where no token is dispatched.
        dispatch=execution.dispatch or "all_gather",
        context=context_of(config, mesh),
        remat=execution.remat,
        fsdp=execution.fsdp,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        storage="bfloat16" if keeps_masters(config) else "float32",
        even=execution.buffer_factor is not None,
        activation_wire=execution.activation_wire,
        expert_chunks=execution.expert_chunks,
        two_batch_overlap=execution.two_batch_overlap,
        overlap_grad_reduce=execution.overlap_grad_reduce,
        gradient_wire=run.gradient_wire,
        mu_dtype=run.mu_dtype,
        attention=attention_of(config, mesh, batch),
        duplicates_experts=mesh.platform == "cpu",
    )


def attention_of(config: ModelConfig, mesh: FoldedMesh, batch: Batch) -> str | None:
    """Attention implementation that stores scores in memory, for `Method.attention`: the one that
    `moe.attention.core` would choose for a micro-batch; None for a kernel."""
    implementation = config.execution.attention
    # Fused kernels store no scores: None.
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
