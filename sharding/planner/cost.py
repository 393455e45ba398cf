"""Time of an optimizer step: products, memory traffic, exposed communication, pipeline bubbles."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from sharding.folding import Layout
from sharding.planner import links, overlap, volumes
from sharding.planner.hardware import Hardware
from sharding.planner.links import Timed
from sharding.planner.memory import activation_bytes, arrived_tokens
from sharding.planner.method import Batch, Method, for_tokens, for_weights, varied
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.models.weights import (
    as_held,
    held,
    layers_on_device,
    one_chunk,
    parameters_in_parts,
)
from sharding.planner.transfer import Transfer, repeated
from sharding.schedule import Schedule


@dataclass(frozen=True)
class System:
    """Efficiency of a program on a device, and the communication that it overlaps.

    Attributes:
      efficiency: the fraction of peak that products reach; the one number that is calibrated.
      hidden: the fraction of communication that is overlapped with products if these last long
        enough.
      hides_hops: an interleaved pipeline sends activations while it computes other chunks.
      hides_gradients: gradients of layers are reduced during the backward pass of the last
        micro-batches, with `Method.overlap_grad_reduce`.
      hides_ends: those of embedding and head too.
      hides_chunks: the all-to-all of a chunk of tokens is overlapped with the expert products of
        another, with `Method.expert_chunks`.
      hides_halves: communication of one half of the rows is overlapped with the products of the
        other, with `Method.two_batch_overlap`.
    """

    efficiency: float = 0.6
    hidden: float = 0.0
    hides_hops: bool = False
    hides_gradients: bool = False
    hides_ends: bool = False
    hides_chunks: bool = False
    hides_halves: bool = False

    def rate(self, hardware: Hardware) -> float:
        """FLOP/s that products reach."""
        return hardware.peak * self.efficiency


@dataclass(frozen=True)
class Cost:
    """Seconds of one step on the slowest stage.

    Attributes:
      products: of matrices and of attention, recomputation included.
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


TRAFFIC_FORWARD, TRAFFIC_BACKWARD = 2, 4
"""Memory accesses per value that a layer computes: written and read; read again, its gradient
written and read, and once more for the sum of two gradients."""


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
    after all micro-batches, except for what `sharding.planner.overlap` hides of the gradients.
    """
    number = batch.num_micro_batches(layout)
    flops = batch.tokens * model.training_flops(batch.time) / layout.num_devices
    computed = _computed(model, as_held(model, layout), batch, method, hardware, system)
    in_layers, in_head, through_memory = computed
    products, traffic = number * (in_layers + in_head), number * through_memory
    beside = in_layers, products / number
    sent = _exposed(model, layout, batch, method, hardware, system, *beside)
    sent = {what: number * time for what, time in sent.items()}
    of_weights = model, as_held(model, layout), for_weights(method), hardware
    if method.fsdp:
        # Shards are fetched while the previous layer computes: only the excess is exposed.
        joined = number * _unsharding(*of_weights)
        sent["shards of layers"] = max(0.0, joined - products - traffic)
    working = products + traffic + sum(sent.values())
    idle = Schedule(layout.pp, number, layout.vpp).bubble * working
    of_layers, of_ends, joined = _once(*of_weights)
    if system.hides_gradients and method.overlap_grad_reduce:
        if system.hides_ends:
            of_layers, of_ends = of_layers + of_ends, 0.0
        of_layers = _beside_backward(of_layers, working / number, model, layout, number)
    sent |= {"gradients": of_layers + of_ends, "new weights": joined}
    return Cost(products, traffic + _optimizer(model, layout, method, hardware), sent, idle, flops)


def cost_at_least(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
) -> float:
    """Lower bound of a step's seconds: without any communication but that of new weights."""
    number, alike = batch.num_micro_batches(layout), as_held(model, layout)
    computed = _computed(model, alike, batch, method, hardware, system)
    working = number * sum(computed) * (1 + Schedule(layout.pp, number, layout.vpp).bubble)
    return working + _at_the_end(model, alike, for_weights(method), hardware)


@functools.lru_cache(maxsize=256)
def _at_the_end(model: ModelSizes, layout: Layout, method: Method, hardware: Hardware) -> float:
    """Seconds of the optimizer and of gathering new weights, which are not overlapped."""
    *_, joined = _once(model, layout, method, hardware)
    return joined + _optimizer(model, layout, method, hardware)


@functools.lru_cache(maxsize=256)
def _computed(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
) -> tuple[float, float, float]:
    """Seconds of a micro-batch: products of the layers, products of the head, memory traffic.

    They are equal for all numbers of chunks on a stage.
    """
    tokens = batch.local_tokens(layout)
    return (
        _products_of_layers(model, layout, batch, method, hardware, system),
        _products_of_head(model, tokens, system.rate(hardware)),
        _traffic(model, layout, tokens, method) / hardware.memory_bandwidth,
    )


def _beside_backward(
    summed: float, micro_batch: float, model: ModelSizes, layout: Layout, number: int
) -> float:
    depth = max(model.num_layers // layout.pp, 1)
    pieces, at_once = (layout.vpp, min(layout.pp, number)) if layout.vpp > 1 else (depth, 1)
    return overlap.beside_backward(summed, micro_batch, pieces, at_once)


def _products_of_head(model: ModelSizes, tokens: int, rate: float) -> float:
    """Seconds of the head's products, which no rematerialisation repeats."""
    return 3 * (2.0 * tokens * model.d_model * model.vocab_size / rate)


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
    tokens, stored, rate = batch.local_tokens(layout), method.stored, system.rate(hardware)

    def one_pass(flops: float, parameters: float, bytes_each: int) -> float:
        return max(flops / rate, parameters * bytes_each / hardware.memory_bandwidth)

    forward = backward = 0.0
    of_all, of_experts = _matrices(model, layout, tokens)
    # Each half of the rows reads all matrices again, each chunk of tokens those of its experts.
    halves = len(method.streams(batch))
    parts = [(of_all, halves), (of_experts, halves * method.expert_chunks)]
    for (flops, parameters), times in parts:
        read = parameters * times
        forward += one_pass(flops, read, stored.weight)
        backward += one_pass(flops, read, stored.weight)
        backward += one_pass(flops, read, 2 * stored.gradient)
    layers = _layers_on_stage(model, layout)
    scores = 2.0 * tokens * layers * model.queries * batch.time / rate
    flops, parameters = _projections(model, layout, tokens)
    again = {
        "none": 0.0,
        "selective": 0.0 if method.resends else scores,
        "projections": one_pass(flops, halves * parameters, stored.weight),
        "full": forward + scores,
    }
    return forward + backward + 3 * scores + again[method.remat]


def _projections(model: ModelSizes, layout: Layout, tokens: int) -> tuple[float, float]:
    """(floating-point operations, parameters) of the query, key and value projections."""
    each = model.d_model * (model.queries + 2 * model.keys) * _layers_on_stage(model, layout)
    return 2.0 * tokens * each, each / layout.tp


def _matrices(model: ModelSizes, layout: Layout, tokens: int) -> list[tuple[float, float]]:
    """(floating-point operations of one pass, parameters) of a device's layers.

    The first pair is that of the matrices that process all tokens, the second that of the experts.
    """
    like = model.num_layers - model.num_dense_layers
    dense = model.num_layers * model.attention_parameters + 3 * model.d_model * (
        like * model.d_ff + model.num_dense_layers * model.dense_d_ff
    )
    met = 3 * model.d_model * model.experts_per_token * model.d_expert * model.num_expert_layers
    experts = model.num_expert_layers * model.expert_parameters
    share = _layers_on_stage(model, layout) / model.num_layers
    return [
        (2.0 * tokens * dense * share, dense * share / layout.tp),
        (2.0 * tokens * met * share, experts * share / (layout.ep * layout.etp)),
    ]


def _layers_on_stage(model: ModelSizes, layout: Layout) -> float:
    """Layers of the deepest stage, with its share of the dense first ones."""
    like = model.num_layers - model.num_dense_layers
    return model.num_layers * layers_on_device(model, layout) / like


def _traffic(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> float:
    """Bytes through memory of a micro-batch on one device."""
    layer = passing(model, layout, tokens, method)
    return times_through_memory(method.remat) * layer * _layers_on_stage(model, layout)


def times_through_memory(remat: str) -> int:
    """Memory accesses per value that a layer computes, with recomputation if there is any."""
    return TRAFFIC_FORWARD + TRAFFIC_BACKWARD + TRAFFIC_FORWARD * (remat != "none")


def passing(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> float:
    """Bytes of all values that a layer computes of a micro-batch, on one device."""
    if method.context == "ring":
        # Keys and values of the others arrive one after the other, and none is kept.
        method = varied(method, context="gather")
    # Received tokens are permuted into rows, and are not kept either; their expert ids are.
    came = arrived_tokens(model, layout, tokens, method) * model.d_model * method.itemsize
    return activation_bytes(model, layout, tokens, method, "none") + came


def _optimizer(model: ModelSizes, layout: Layout, method: Method, hardware: Hardware) -> float:
    """Seconds of the optimizer's step: its state read and written, weights and gradients."""
    stored = method.stored
    each = 2 * (stored.master + stored.moments) + stored.weight + stored.gradient
    parts = parameters_in_parts(model, as_held(model, layout))
    return parts * each / hardware.memory_bandwidth


def _exposed(
    model: ModelSizes,
    layout: Layout,
    batch: Batch,
    method: Method,
    hardware: Hardware,
    system: System,
    in_layers: float,
    products: float,
) -> dict[str, float]:
    """Seconds of a micro-batch's exposed communication, by kind.

    Args:
      in_layers: seconds of its products in the layers.
      products: of all its products.
    """
    sent = _sends(model, layout, batch, method, hardware)
    if layout.pp > 1:
        hides = layout.vpp > 1 and system.hides_hops
        hop = volumes.hop(model, batch.local_tokens(layout), method)
        once = 0.0 if hides else links.seconds(hop, layout, hardware)
        sent["pipeline"] = 2 * layout.vpp * once
    chunks = method.expert_chunks if system.hides_chunks else 1
    if system.hides_halves and len(method.streams(batch)) > 1:
        sent = overlap.beside_halves(sent, in_layers, chunks)
    elif chunks > 1 and "experts" in sent:
        flops = 3 * _matrices(model, layout, batch.local_tokens(layout))[1][0]
        under = flops / system.rate(hardware)
        sent["experts"] = overlap.beside_chunks(sent["experts"], under, chunks)
    total = sum(sent.values())
    if not total:
        return {}
    shown = max((1 - system.hidden) * total, total - products)
    return {what: time * shown / total for what, time in sent.items() if time}


def _sends(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> dict[str, float]:
    """Seconds of a micro-batch's communication without pipeline hops: layers, embedding, head."""
    of_layer, of_ends = _in_groups(model, one_chunk(layout), batch, for_tokens(method), hardware)
    layers = _layers_on_stage(model, layout)
    found = {name: layers * seconds for name, seconds in of_layer}
    for name, seconds in of_ends:
        found[name] = found.get(name, 0.0) + seconds
    return found


@functools.lru_cache(maxsize=1024)
def _in_groups(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> tuple[Timed, Timed]:
    """A micro-batch's communication in one layer, and in embedding and head, by `GROUPS`."""
    given = model, layout, batch, method, hardware
    found = []
    for sent in (links.of_layer(*given), links.of_ends(*given)):
        groups: dict[str, float] = {}
        for what, seconds in sent:
            groups[_group(what)] = groups.get(_group(what), 0.0) + seconds
        found.append(tuple(groups.items()))
    return found[0], found[1]


@functools.lru_cache(maxsize=256)
def _group(what: str) -> str:
    return next(name for name, words in GROUPS if any(word in what for word in words))


@functools.lru_cache(maxsize=1024)
def _once(
    model: ModelSizes, layout: Layout, method: Method, hardware: Hardware
) -> tuple[float, float, float]:
    """Seconds of communication once per step.

    They are those of the reduction of the layers' gradients, of that of the embedding's and head's
    gradients, and of the all-gather of new weights.
    """
    of_ends = {f"gradients: {one.what}" for one in held(model, layout) if not one.depth}
    sent = volumes.gradients(model, layout, method)
    joined = [one for one in sent if one.kind == "all_gather"]
    summed = [one for one in sent if one.kind != "all_gather"]
    ends = [one for one in summed if one.what in of_ends]
    layers = [one for one in summed if one.what not in of_ends]
    return (
        _seconds(layers, layout, hardware),
        _seconds(ends, layout, hardware),
        _seconds(joined, layout, hardware),
    )


@functools.lru_cache(maxsize=1024)
def _unsharding(model: ModelSizes, layout: Layout, method: Method, hardware: Hardware) -> float:
    """Seconds of FSDP per micro-batch: layers gathered twice, their gradients reduce-scattered."""
    joined = list(volumes.unsharding(model, layout, method))
    sent = repeated(joined, 2) + [volumes.summed_back(one, layout, method) for one in joined]
    return _seconds(sent, layout, hardware)


GROUPS = (
    ("context", ("keys", "values", "queries", "attention's output")),
    ("attention and dense layers over tp", ("attention", "dense layer", "shared expert")),
    ("experts", ("experts", "load")),
    ("vocabulary", ("head", "embedding")),
    ("order of rows", ("halves",)),
)
"""Names of groups of transfers, by the words in the transfers' names."""


def _seconds(transfers: Iterable[Transfer], layout: Layout, hardware: Hardware) -> float:
    return sum((links.seconds(one, layout, hardware) for one in transfers), 0.0)
