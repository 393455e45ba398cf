"""What the planner says of a run's updates: memory that comes and goes, and time."""

from dataclasses import replace

from jrl.config.run import RunConfig
from jrl.trainer.learner.masters import keeps_masters
from jrl.trainer.setup.geometry import Geometry
from jrl.trainer.setup.network import check_overlaps
from moe.attention.context_parallel.choice import context_of
from moe.attention.core import LARGEST_KEPT, LARGEST_PLAIN
from moe.config import ModelConfig
from moe.counts.sizes import sizes_of
from moe.router.capacity import can_drop
from sharding.folding import FoldedMesh, Layout
from sharding.planner.cost import Cost, cost
from sharding.planner.hardware import Hardware
from sharding.planner.memory import Memory, memory
from sharding.planner.method import Batch, Method
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.validation.calibration import of_this_library


def memory_of_update(model: ModelConfig, geometry: Geometry, run: RunConfig) -> Memory:
    """Bytes on one device while the policy is updated, as `sharding.planner.memory` counts them.

    Sequences count with their whole length; where completions share a prompt it is less.
    """
    return memory(*_given(model, geometry, run), model.execution.vocab_chunk)


def time_of_update(
    model: ModelConfig, geometry: Geometry, run: RunConfig, hardware: Hardware
) -> Cost:
    """Seconds of one optimizer step on a mini-batch, with products as fast as those of
    Megatron-Core and the overlap that the run asks for (`sharding.planner.overlap`)."""
    return cost(*_given(model, geometry, run), hardware, of_this_library(hardware))


def _given(
    model: ModelConfig, geometry: Geometry, run: RunConfig
) -> tuple[ModelSizes, Layout, Batch, Method]:
    """What the planner asks of an update."""
    batch = batch_of(geometry)
    return sizes_of(model), geometry.mesh.layout, batch, method_of(model, geometry.mesh, batch, run)


OVERLAPS = ("two_batch_overlap", "overlap_grad_reduce")
"""What a run may turn on that changes no more than when it communicates."""


def times_with_overlap(
    model: ModelConfig, geometry: Geometry, run: RunConfig, hardware: Hardware
) -> dict[str, Cost]:
    """The same with each of `OVERLAPS` that the run has not and could have."""
    found = {}
    for name in OVERLAPS:
        execution = replace(model.execution, **{name: True})
        other = replace(model, execution=execution)
        if execution == model.execution or can_drop(other):
            continue
        # The check of a run that asks for it says whether it could have it.
        try:
            check_overlaps(other, geometry.mesh, *geometry.overlapping(run.packing))
        except ValueError:
            continue
        found[name] = time_of_update(other, geometry, run, hardware)
    return found


def batch_of(geometry: Geometry) -> Batch:
    """A mini-batch and its micro-batches."""
    mini = geometry.recipe.mini_batch_size
    # The longest that a row can be: how long responses will be nobody knows yet.
    time = geometry.prompt_length + geometry.response_length
    return Batch(mini, time, mini // geometry.num_micro_batches // geometry.mesh.layout.dp)


def method_of(config: ModelConfig, mesh: FoldedMesh, batch: Batch, run: RunConfig) -> Method:
    """How the network is computed, and what the run says of gradients and moments."""
    execution = config.execution
    return Method(
        # Where no token travels there is none.
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
        copies_experts=mesh.platform == "cpu",
    )


def attention_of(config: ModelConfig, mesh: FoldedMesh, batch: Batch) -> str | None:
    """What holds scores in memory, as `Method.attention` names it: what `moe.attention.core` would
    take for a micro-batch."""
    named = config.execution.attention
    # What kernels compute holds no scores in memory: None.
    if named is not None:
        return {"plain": "plain", "xla": "plain", "blocked": "blocked"}.get(named)
    # A GPU computes it with cuDNN; devices that need not exist are taken for GPUs.
    if mesh.platform in ("gpu", None) and config.dtype == "bfloat16":
        return None
    layout = mesh.layout
    # Between layers tokens are spread over tp; in attention a rank has all of them, and some heads.
    queries = batch.local_tokens(layout) * layout.tp
    scores = config.num_heads // layout.tp * queries * batch.time
    most = LARGEST_PLAIN if mesh.platform == "cpu" else LARGEST_KEPT
    return "blocked" if scores > most else "plain"
