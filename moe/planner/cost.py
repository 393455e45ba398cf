"""Time of an optimizer step: products, memory traffic, exposed communication, pipeline bubbles."""

import functools
from dataclasses import dataclass, replace

from moe.execution import Execution
from moe.planner import communication, volumes
from moe.planner.memory import activation_bytes, received_tokens
from moe.planner.method import Batch, Method, for_weights, with_fields
from moe.planner.models import (
    ModelSizes,
    layers_on_deepest_stage,
    layers_on_device,
    sharded_parameters,
    weight_layout,
)
from sharding.costs.hardware import Hardware
from sharding.folding import Layout
from sharding.schedule import Schedule

SHARE_OF_PRODUCTS = 112 / 132
"""Multiprocessors of an H100 that are left to products while DeepEP sends with 20 of 132."""
TRAFFIC_FORWARD, TRAFFIC_BACKWARD = 2, 4
"""Memory accesses per value that a layer computes: written and read; read again, its gradient
written and read, and once more for the sum of two gradients."""
_MEGATRON_CORE = Method(
    Execution(dispatch="ragged", overlap_grad_reduce=True),
    storage="mixed",
    even=True,
    resends=False,
    in_place=True,
    fused_activation=True,
)
METHODS = {
    "Megatron-Core": _MEGATRON_CORE,
    "MegaScale-MoE": with_fields(
        _MEGATRON_CORE, context="ulysses", storage="mixed-bfloat16-wire", resends=True
    ),
}
BLACKWELL = ("b200", "gb200", "b300")
BLACKWELL_EFFICIENCY = 0.41420
"""`System.efficiency` of Megatron-Core on `BLACKWELL`."""
DISPATCHES = {"Megatron-Core": ("ragged", "deepep")}
"""Dispatches of a program that has more than one."""


@dataclass(frozen=True)
class System:
    """Efficiency of a program on a device, and the communication that it overlaps.

    Attributes:
      efficiency: the fraction of peak that products reach.
      tensor_share: the share of it that is left under tensor parallelism, whose products are
        narrower and whose operations a host may dispatch one by one.
      hidden: the fraction of communication that is overlapped with products if these last long
        enough.
      hides_hops: an interleaved pipeline sends activations while it computes other chunks.
      hides_gradients: gradients of layers are reduced during the backward pass of the last
        micro-batches, with `Execution.overlap_grad_reduce`.
      hides_embed_and_head: gradients of embedding and head too.
      hides_chunks: the all-to-all of a chunk of tokens is overlapped with the expert products of
        another, with `Execution.expert_chunks`.
      hides_two_batch: communication of one half of the rows is overlapped with the products of the
        other, with `Execution.two_batch_overlap`.
      hides_experts: the all-to-all of one micro-batch is overlapped with the products of another,
        in four pieces, like two batches; the products have `SHARE_OF_PRODUCTS` of the device
        meanwhile.
      hides_shards: shards of a layer's weights are gathered while the layer before computes, with
        `Execution.fsdp`.
      launch: seconds that each expert of a device but the first adds to a pass of a micro-batch
        through a layer, fitted to published speeds of fine experts; probably the host's launches.
      fills_stages: where layers do not fill all chunks of a pipeline, the stage with the head has
        fewer; else all are as deep as the deepest.
    """

    efficiency: float = 0.6
    tensor_share: float = 1.0
    hidden: float = 0.0
    hides_hops: bool = False
    hides_gradients: bool = False
    hides_embed_and_head: bool = False
    hides_chunks: bool = False
    hides_two_batch: bool = False
    hides_experts: bool = False
    hides_shards: bool = True
    launch: float = 0.0
    fills_stages: bool = False

    def rate(self, hardware: Hardware, layout: Layout) -> float:
        """FLOP/s that products reach."""
        share = self.tensor_share if layout.tp > 1 else 1.0
        return hardware.peak * self.efficiency * share


@dataclass(frozen=True)
class Cost:
    """Seconds of one step on the slowest stage.

    Attributes:
      products: of matrices and of attention, recomputation and launches included.
      traffic: norms, activations, permutations and the optimizer, at the rate of memory.
      communication: exposed, by kind.
      bubble: idle time of the pipeline.
      flops: floating-point operations of the step that the model needs, on one device.
    """

    products: float
    traffic: float
    communication: dict[str, float]
    bubble: float
    flops: float

    @property
    def exposed(self) -> float:
        """Exposed communication, not overlapped."""
        return sum(self.communication.values())

    @property
    def total(self) -> float:
        return self.products + self.traffic + self.exposed + self.bubble

    def mfu(self, hardware: Hardware) -> float:
        """Model FLOPs utilisation: what the model needs over what the devices could."""
        return self.flops / (self.total * hardware.peak)


def cost(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
) -> Cost:
    """Time of a step of `batch`.

    A stage processes the micro-batches one after the other; the slowest stage (the deepest, with
    the head) sets the pace. The pipeline idles for `Schedule.bubble`, ``(pp - 1) / vpp``
    micro-batches where ``pp`` divides their number. Gradients are reduced and new weights gathered
    after all micro-batches; `Execution.overlap_grad_reduce` hides a part of the gradients.
    """
    num_micro_batches = batch.num_micro_batches(layout)
    flops = batch.tokens * model.training_flops(batch.time) / layout.num_devices
    stage_layout, weight_method = weight_layout(model, layout), for_weights(method)
    layer_products, head_products, memory_traffic = _pass_seconds(
        model, stage_layout, batch, method, hardware, system
    )
    products = num_micro_batches * (layer_products + head_products)
    traffic = num_micro_batches * memory_traffic
    all_products = products / num_micro_batches
    sent = _exposed_communication(
        model, layout, batch, method, hardware, system, layer_products, all_products
    )
    sent = {what: num_micro_batches * time for what, time in sent.items()}
    if method.fsdp:
        # If shards are fetched while the previous layer computes, only the excess is exposed.
        gathers = num_micro_batches * communication.fully_sharded_seconds(
            model, stage_layout, weight_method, hardware
        )
        hidden = products + traffic if system.hides_shards else 0.0
        sent["shards of layers"] = max(0.0, gathers - hidden)
    working = products + traffic + sum(sent.values())
    idle = Schedule(layout.pp, num_micro_batches, layout.vpp).bubble * working
    layer_gradients, other_gradients, new_weights = communication.step_seconds(
        model, stage_layout, weight_method, hardware
    )
    if system.hides_gradients and method.execution.overlap_grad_reduce:
        if system.hides_embed_and_head:
            layer_gradients, other_gradients = layer_gradients + other_gradients, 0.0
        layer_gradients = communication.exposed_reduction(
            layer_gradients, working / num_micro_batches, model, layout, num_micro_batches
        )
    sent |= {"gradients": layer_gradients + other_gradients, "new weights": new_weights}
    traffic += _optimizer_seconds(model, layout, method, hardware)
    return Cost(products, traffic, sent, idle, flops)


def cost_at_least(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
) -> float:
    """Lower bound of a step's seconds: of its communication only new weights count."""
    num_micro_batches, stage_layout = batch.num_micro_batches(layout), weight_layout(model, layout)
    pass_seconds = _pass_seconds(model, stage_layout, batch, method, hardware, system)
    bubble = Schedule(layout.pp, num_micro_batches, layout.vpp).bubble
    working = num_micro_batches * sum(pass_seconds) * (1 + bubble)
    return working + _final_seconds(model, stage_layout, for_weights(method), hardware)


@functools.lru_cache(maxsize=256)
def _final_seconds(model: ModelSizes, layout: Layout, method: Method, hardware: Hardware) -> float:
    """Seconds of the optimizer and of gathering new weights; neither is overlapped."""
    *_, new_weights = communication.step_seconds(model, layout, method, hardware)
    return new_weights + _optimizer_seconds(model, layout, method, hardware)


@functools.lru_cache(maxsize=256)
def _pass_seconds(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
) -> tuple[float, float, float]:
    """Seconds of a micro-batch: products of the layers, products of the head, memory traffic.

    They are equal for all numbers of chunks on a stage. No rematerialisation repeats the head's.
    """
    tokens = batch.local_tokens(layout)
    accesses = times_through_memory(method.execution.remat)
    in_layer = accesses * value_bytes(model, layout, tokens, method)
    layers = _products_of_layers(model, layout, batch, method, hardware, system)
    head = 3 * (2.0 * tokens * model.d_model * model.vocab_size / system.rate(hardware, layout))
    if system.fills_stages:
        # The stage with the head is as deep as the others, or less.
        depth = layers_on_device(model, layout)
        spare = min(layout.pp * depth - model.num_main_layers, depth // layout.vpp)
        head = max(0.0, head - layers * spare / depth)
    traffic = in_layer * layers_on_deepest_stage(model, layout) / hardware.memory_bandwidth
    return layers, head, traffic


def _products_of_layers(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
) -> float:
    """Seconds of the layers' products of a micro-batch on one device of the slowest stage.

    A product takes the time of its arithmetic or, if that is longer, of its weights' memory
    traffic: read forward and for the gradient of its input, and the sum of their gradients read and
    written.
    """
    tokens, stored, rate = batch.local_tokens(layout), method.stored, system.rate(hardware, layout)
    remat = method.execution.remat

    def one_pass(flops: float, parameters: float, bytes_each: int) -> float:
        return max(flops / rate, parameters * bytes_each / hardware.memory_bandwidth)

    forward = backward = 0.0
    all_matrices, expert_matrices = _matrices(model, layout, tokens)
    # Each half of the rows reads all matrices again, each chunk of tokens reads its experts'
    # matrices.
    num_streams = len(method.streams(batch))
    expert_reads = num_streams * method.execution.num_chunks
    reads = [(all_matrices, num_streams), (expert_matrices, expert_reads)]
    for (flops, parameters), num_reads in reads:
        read_parameters = parameters * num_reads
        forward += one_pass(flops, read_parameters, stored.weight)
        backward += one_pass(flops, read_parameters, stored.weight)
        backward += one_pass(flops, read_parameters, 2 * stored.gradient)
    layers = layers_on_deepest_stage(model, layout)
    seen = model.seen(batch.time) * layers / model.num_layers
    scores = tokens * (model.queries + model.outputs) * seen / rate
    projections = model.projection_parameters * layers
    recomputed = {
        "none": 0.0,
        "selective": 0.0 if method.resends else scores,
        "projections": one_pass(
            2.0 * tokens * projections, num_streams * (projections / layout.tp), stored.weight
        ),
        "full": forward + scores,
    }
    repeated = recomputed[remat]
    if method.repeats_experts:
        flops, parameters = expert_matrices
        repeated += one_pass(flops, parameters * expert_reads, stored.weight)
    launches = 0.0
    if model.num_experts:
        again = remat == "full" or method.repeats_experts
        passes = (4 if again else 3) * expert_reads
        local = model.num_experts // layout.ep
        routed = layers * model.num_expert_layers / model.num_layers
        launches = passes * routed * (local - 1) * system.launch
    return forward + backward + 3 * scores + repeated + launches


def _matrices(model: ModelSizes, layout: Layout, tokens: int) -> list[tuple[float, float]]:
    """(FLOPs of a pass, parameters): of the matrices that process all tokens, of the experts."""
    dense, routed = model.dense_parameters, model.routed_parameters
    experts = model.num_expert_layers * model.expert_parameters
    share = layers_on_deepest_stage(model, layout) / model.num_layers
    return [
        (2.0 * tokens * dense * share, dense * share / layout.tp),
        (2.0 * tokens * routed * share, experts * share / (layout.ep * layout.etp)),
    ]


def times_through_memory(remat: str) -> int:
    """Memory accesses per value that a layer computes, with recomputation if there is any."""
    return TRAFFIC_FORWARD + TRAFFIC_BACKWARD + TRAFFIC_FORWARD * (remat != "none")


def value_bytes(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> float:
    """Bytes of all values that a layer computes of a micro-batch, on one device."""
    if method.context == "ring":
        # Keys and values of the others arrive one after the other, and none is kept.
        method = with_fields(method, context="gather")
    # Received tokens are permuted into rows, and are not kept either; their expert ids are.
    received = received_tokens(model, layout, tokens, method) * model.d_model * method.itemsize
    return activation_bytes(model, layout, tokens, method, "none") + received


def _optimizer_seconds(
    model: ModelSizes, layout: Layout, method: Method, hardware: Hardware
) -> float:
    """Seconds of the optimizer's step: its state read and written, weights and gradients."""
    stored = method.stored
    each = 2 * (stored.master + stored.moments) + stored.weight + stored.gradient
    num_parameters = sharded_parameters(model, weight_layout(model, layout))
    return num_parameters * each / hardware.memory_bandwidth


def _exposed_communication(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
    layer_products: float,
    products: float,
) -> dict[str, float]:
    """Seconds of a micro-batch's exposed communication, by kind; `products` has the head's too."""
    sent = communication.micro_batch_seconds(model, layout, batch, method, hardware)
    if layout.pp > 1:
        hides = layout.vpp > 1 and system.hides_hops
        hop = volumes.hop(model, batch.local_tokens(layout), method)
        sent["pipeline"] = 0.0 if hides else 2 * layout.vpp * hop.seconds(layout, hardware)
    chunks = method.execution.num_chunks if system.hides_chunks else 1
    if system.hides_two_batch and len(method.streams(batch)) > 1:
        sent = communication.exposed_with_two_batches(sent, layer_products, chunks)
    elif system.hides_experts and "experts" in sent:
        slower = layer_products * (1 / SHARE_OF_PRODUCTS - 1)
        sent["experts"] = slower + communication.exposed_seconds(
            sent["experts"], layer_products / SHARE_OF_PRODUCTS, 4
        )
    elif chunks > 1 and "experts" in sent:
        flops = 3 * _matrices(model, layout, batch.local_tokens(layout))[1][0]
        expert_seconds = flops / system.rate(hardware, layout)
        # At least one chunk is exposed: the dispatch of the first and the return of the last.
        sent["experts"] = communication.exposed_seconds(sent["experts"], expert_seconds, chunks)
    total = sum(sent.values())
    if not total:
        return {}
    exposed = max((1 - system.hidden) * total, total - products)
    return {what: time * exposed / total for what, time in sent.items() if time}


SYSTEMS = {
    "Megatron-Core": System(
        efficiency=0.61883,
        launch=9.7171e-5,
        hides_hops=True,
        hides_gradients=True,
        hides_embed_and_head=True,
        fills_stages=True,
    ),
    "MegaScale-MoE": System(
        efficiency=0.37728,
        hidden=1.0,
        hides_hops=True,
        hides_gradients=True,
        hides_embed_and_head=True,
    ),
}
"""Megatron-Core waits for what a layer sends; hiding it is what MegaScale-MoE is about."""


def system_on(name: str, hardware: str) -> System:
    """A program's system on a type of device, for example Megatron-Core on gb200."""
    if name == "Megatron-Core" and hardware in BLACKWELL:
        return replace(SYSTEMS[name], efficiency=BLACKWELL_EFFICIENCY)
    return SYSTEMS[name]


def library_system(hardware: Hardware) -> System:
    """System of this library: products as fast as Megatron-Core's, overlap as a run requests it.

    It overlaps expert chunks, two batches and gradient reduction. None of this is measured on an
    accelerator.
    """
    overlaps = hardware.overlaps
    return System(
        SYSTEMS["Megatron-Core"].efficiency,
        hides_gradients=overlaps,
        hides_chunks=overlaps,
        hides_two_batch=overlaps,
    )
