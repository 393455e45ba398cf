"""What the planner says of a run's updates: memory that comes and goes, and time."""

from dataclasses import replace

from jrl.trainer.learner.masters import keeps_masters
from jrl.trainer.setup.network import check_overlaps
from jrl.trainer.setup.setup import Setup
from moe.attention.context_parallel.choice import context_of
from moe.attention.core import LARGEST_KEPT, LARGEST_PLAIN
from moe.counts.sizes import sizes_of
from moe.router.capacity import can_drop
from sharding.planner.cost import Cost, cost
from sharding.planner.hardware import Hardware
from sharding.planner.memory import Memory, memory
from sharding.planner.method import Batch, Method
from sharding.planner.validation.calibration import of_this_library


def memory_of_update(setup: Setup) -> Memory:
    """Bytes on one device while the policy is updated, as `sharding.planner.memory` counts them.

    Sequences count with their whole length; where completions share a prompt it is less.
    """
    chunk = setup.model.execution.vocab_chunk
    given = sizes_of(setup.model), setup.mesh.layout, batch_of(setup), method_of(setup)
    return memory(*given, chunk)


def time_of_update(setup: Setup, hardware: Hardware) -> Cost:
    """Seconds of one optimizer step on a mini-batch, with products as fast as those of
    Megatron-Core and the overlap that the run asks for (`sharding.planner.overlap`)."""
    given = sizes_of(setup.model), setup.mesh.layout, batch_of(setup), method_of(setup)
    return cost(*given, hardware, of_this_library(hardware))


OVERLAPS = ("two_batch_overlap", "overlap_grad_reduce")
"""What a run may turn on that changes no more than when it communicates."""


def times_with_overlap(setup: Setup, hardware: Hardware) -> dict[str, Cost]:
    """The same with each of `OVERLAPS` that the run has not and could have."""
    found = {}
    for name in OVERLAPS:
        execution = replace(setup.model.execution, **{name: True})
        model = replace(setup.model, execution=execution)
        if execution == setup.model.execution or can_drop(model):
            continue
        # The check of a run that asks for it says whether it could have it.
        try:
            check_overlaps(model, setup.mesh, setup.geometry.parts(setup.run.packing))
        except ValueError:
            continue
        found[name] = time_of_update(replace(setup, model=model), hardware)
    return found


def batch_of(setup: Setup) -> Batch:
    """A mini-batch and its micro-batches."""
    recipe, rows = setup.recipe, setup.geometry
    # The longest that a row can be: how long responses will be nobody knows yet.
    time = rows.prompt_length + rows.response_length
    micro = recipe.mini_batch_size // setup.geometry.num_micro_batches
    return Batch(recipe.mini_batch_size, time, micro // setup.mesh.layout.dp)


def method_of(setup: Setup) -> Method:
    """How the network is computed."""
    config = setup.model
    execution = config.execution
    return Method(
        # Where no token travels there is none.
        dispatch=execution.dispatch or "all_gather",
        context=context_of(config, setup.mesh),
        remat=execution.remat,
        fsdp=execution.fsdp,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        storage="bfloat16" if keeps_masters(config) else "float32",
        even=execution.buffer_factor is not None,
        activation_wire=execution.activation_wire,
        expert_chunks=execution.expert_chunks,
        two_batch_overlap=execution.two_batch_overlap,
        overlap_grad_reduce=execution.overlap_grad_reduce,
        gradient_wire=setup.run.gradient_wire,
        mu_dtype=setup.run.mu_dtype,
        attention=attention_of(setup),
        copies_experts=setup.mesh.platform == "cpu",
    )


def attention_of(setup: Setup) -> str | None:
    """What holds scores in memory, as `Method.attention` names it: what `moe.attention.core` would
    take for a micro-batch."""
    named = setup.model.execution.attention
    # What cuDNN computes holds no scores in memory: None.
    if named is not None:
        return {"plain": "plain", "xla": "plain", "blocked": "blocked"}.get(named)
    # A GPU computes it with cuDNN; devices that need not exist are taken for GPUs.
    if setup.mesh.platform in ("gpu", None) and setup.model.dtype == "bfloat16":
        return None
    batch, layout = batch_of(setup), setup.mesh.layout
    # Between layers tokens are spread over tp; in attention a rank has all of them, and some heads.
    queries = batch.local_tokens(layout) * layout.tp
    scores = setup.model.num_heads // layout.tp * queries * batch.time
    most = LARGEST_PLAIN if setup.mesh.platform == "cpu" else LARGEST_KEPT
    return "blocked" if scores > most else "plain"
