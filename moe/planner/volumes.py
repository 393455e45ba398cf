"""Communication volumes of all collectives of a training step.

T are the tokens of a micro-batch on one device, h the model width.
"""

import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain

from moe.planner.method import Batch, Method
from moe.planner.models import (
    ModelSizes,
    WeightGroup,
    layers_on_device,
    shards_vocabulary,
    weight_groups,
)
from sharding.costs.transfer import FLOAT32, INT32, TokenDispatch, Transfer, balanced_rows
from sharding.folding import Layout
from sharding.folding.layout import prime_factors
from sharding.schedule import Schedule

BFLOAT16 = 2


def layer(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, has_experts: bool = True
) -> tuple[list[Transfer], list[Transfer]]:
    """Collectives of one block for one micro-batch, forward and backward.

    With two-batch overlap (`Method.streams`) each half of the rows sends separately.

    Args:
      has_experts: it is one of the layers with experts, not of the dense ones before them.
    """
    collectives = []
    for rows in method.streams(batch):
        collectives.append(non_expert(model, layout, rows, method, has_experts))
        if has_experts:
            collectives.append(experts(model, layout, rows.local_tokens(layout), method))
    forward, backward = zip(*collectives, strict=True)
    return [*chain(*forward)], [*chain(*backward)]


def non_expert(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, has_experts: bool = True
) -> tuple[list[Transfer], list[Transfer]]:
    """Collectives of a block besides `experts`, for rows that pass through it together.

    They depend on ``tp`` and ``cp`` of the layout only.
    """
    tokens = batch.local_tokens(layout)
    forward = tensor_parallel("attention", model, layout, tokens, method)
    forward += context(model, layout, tokens, method)
    if model.d_ff or not has_experts:
        name = "shared expert" if has_experts and model.num_experts else "dense layer"
        forward += tensor_parallel(name, model, layout, tokens, method)
    if has_experts and model.num_experts:
        forward += router(model, batch.micro_rows)
    backward = [t.transposed(layout) for t in forward if t.gradient]
    if method.context == "ring":
        backward += ring_backward(model, layout, tokens, method)
    return _with_repeated(forward, backward, layout, method)


def experts(
    model: ModelSizes, layout: Layout, tokens: int, method: Method
) -> tuple[list[Transfer], list[Transfer]]:
    """Collectives of `dispatch` in a layer, repeated ones too, by ``ep`` and ``etp`` only."""
    forward, backward = dispatch(model, layout, tokens, method) if model.num_experts else ([], [])
    if method.repeats_experts:
        backward = [*forward, *backward]
    return _with_repeated(forward, backward, layout, method)


def _with_repeated(
    forward: list[Transfer], backward: list[Transfer], layout: Layout, method: Method
) -> tuple[list[Transfer], list[Transfer]]:
    if method.repeats_all:
        backward = forward + backward
    elif method.repeats(method.execution.remat):
        backward = [t for t in forward if t.repeated] + backward
    return drop_empty(forward, layout), drop_empty(backward, layout)


def tensor_parallel(
    what: str, model: ModelSizes, layout: Layout, tokens: int, method: Method
) -> list[Transfer]:
    """Tensor parallelism: all-gather of tokens for a layer, reduce-scatter of its outputs.

    Heads or hidden units are sharded over ``tp``. Volume: ``2 T h (tp - 1)``, or
    ``2 b s h (tp - 1) / (tp cp)`` of the whole micro-batch.
    """
    size, width = tokens * model.d_model, method.itemsize
    gather = Transfer(f"tokens to {what}", "all_gather", ("tp",), size, width, 1, width, True)
    size *= layout.tp
    return [gather, Transfer(f"sums of {what}", "reduce_scatter", ("tp",), size, width, 1, width)]


def context(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """Context parallelism: keys and values by all-gather or ring, or Ulysses' all-to-all of heads.

    Where what is kept is not what attention reads (`ModelSizes.keeps_projected`, "projections"),
    Ulysses' first all-to-all is `repeated` too.
    """
    if layout.cp == 1:
        return []
    keys, values = tokens * model.keys, tokens * model.values
    queries, outputs, width = tokens * model.queries, tokens * model.outputs, method.itemsize
    both = (("keys", keys), ("values", values))
    if method.context == "gather":
        return [
            Transfer(what, "all_gather", ("cp",), elements, width, 1, width, repeated=True)
            for what, elements in both
        ]
    if method.context == "ring":
        hops, _ = ring_hops(layout)
        return [Transfer(what, "permute", ("cp",), size, width, hops) for what, size in both]
    exchanged = queries + (keys + values) * kv_replication(model, layout)
    exchange = partial(Transfer, kind="all_to_all", axes=("cp",), itemsize=width, gradient=width)
    is_repeated = model.keeps_projected or method.execution.remat == "projections"
    return [
        exchange("queries, keys and values", elements=exchanged, repeated=is_repeated),
        exchange("attention's output", elements=outputs, repeated=True),
    ]


def kv_replication(model: ModelSizes, layout: Layout) -> int:
    """Number of copies of each key/value head in Ulysses, so that ``cp`` divides a rank's heads."""
    return layout.cp // math.gcd(model.num_kv_heads // layout.tp, layout.cp)


def ring_backward(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """Backward pass of a ring: keys and values again, and their float32 gradients a hop behind."""
    size, (hops, of_gradients) = tokens * (model.keys + model.values), ring_hops(layout)
    what = "keys and values"
    return [
        Transfer(what, "permute", ("cp",), size, method.itemsize, hops),
        Transfer(f"gradient of {what}", "permute", ("cp",), size, FLOAT32, of_gradients),
    ]


def ring_hops(layout: Layout) -> tuple[int, int]:
    """Shards that a device of a ring receives, in multiples of its own: of keys, and of gradients.

    Gradients start a hop later and return to their own device. Both are ``cp - 1``, except under a
    pipeline with a ``cp`` that is no power of two: a hop along a digit of base ``p`` receives
    ``p - 1`` shards (`moe.attention.ring_schedule.Exchange`).
    """
    radices, cp = prime_factors(layout.cp), layout.cp
    if layout.pp == 1 or not radices:
        return cp - 1, cp - 1
    words = itertools.accumulate(radices, operator.mul)
    digits = [(radix, cp // word) for radix, word in zip(radices, words, strict=True)]
    hops = sum(times * (radix - 1) ** 2 for radix, times in digits)
    home = sum(radix - 1 for radix, times in digits if times % radix)
    return hops, hops - (radices[0] - 1) + home


def router(model: ModelSizes, sequences: int) -> list[Transfer]:
    """All-reduce of the expert load: tokens of each sequence per expert, for the balancing loss."""
    counts = sequences * model.num_experts
    return [Transfer("load of sequences", "all_reduce", ("cp", "tp"), counts, FLOAT32)]


def dispatch(
    model: ModelSizes, layout: Layout, tokens: int, method: Method
) -> tuple[list[Transfer], list[Transfer]]:
    """Dispatch of tokens to experts and combine, with ids and gate weights; both passes."""
    per_peer, forward, backward = tokens_per_peer(model, layout, tokens), [], []
    for size, count in chunk_sizes(tokens, method.execution.num_chunks):
        each = min(per_peer, balanced_tokens_per_peer(model, layout, size, method))
        chunk = _dispatcher(model, layout, size, each, method)
        forward_once, backward_once = chunk.transfers()
        forward += repeat_transfers(forward_once, count)
        backward += repeat_transfers(backward_once, count)
    return forward, backward


def _dispatcher(
    model: ModelSizes, layout: Layout, tokens: int, per_peer: int, method: Method
) -> TokenDispatch:
    return TokenDispatch(
        method.dispatch,
        layout,
        tokens=tokens,
        per_peer=per_peer,
        k=model.experts_per_token,
        d_model=model.d_model,
        itemsize=method.itemsize,
        # With buffers of the size of even routing, as much is received.
        buffer=None if method.even else layout.ep * per_peer,
        comm_dtype=method.execution.activation_wire,
        num_experts=model.num_experts,
        block=method.deepep_block or 1,
        server_devices=method.execution.server_devices,
    )


def relayed_tokens(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> int:
    """Tokens that a device relays from other servers to its own; 0 without two levels."""
    per_peer = slots_per_peer(model, layout, tokens, method)
    return _dispatcher(model, layout, tokens, per_peer, method).relayed


def chunk_sizes(tokens: int, chunks: int) -> list[tuple[int, int]]:
    """(tokens, number of chunks of this size), as `moe.experts.dispatch.choice` splits."""
    each, more = divmod(tokens, max(1, min(chunks, tokens)))
    less = max(1, min(chunks, tokens)) - more
    return [(size, count) for size, count in ((each + 1, more), (each, less)) if count]


def tokens_per_expert(model: ModelSizes, tokens: int) -> int:
    """Capacity of an expert for the tokens of one device; all of them if there is no capacity
    factor."""
    if model.capacity_factor is None:
        return tokens
    average = model.capacity_factor * tokens * model.experts_per_token / model.num_experts
    return min(tokens, math.ceil(round(average, 9)))


def tokens_per_peer(model: ModelSizes, layout: Layout, tokens: int) -> int:
    """Most tokens that a device sends to another where buffers are of one size.

    ``min(T, C L)`` with L experts on a device and a capacity C; T if there is no capacity.
    """
    if model.capacity_factor is None:
        return tokens
    return min(tokens, tokens_per_expert(model, tokens) * (model.num_experts // layout.ep))


def balanced_tokens_per_peer(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> int:
    """Tokens that a device sends to another at most under `Execution.buffer_factor`.

    These are the `balanced_rows`, shared among the devices that share experts, and at most T.
    """
    if method.execution.buffer_factor is None:
        return tokens
    rows = balanced_rows(method.execution.buffer_factor, tokens, model.experts_per_token, layout)
    return min(tokens, rows // (layout.ep * layout.etp))


def slots_per_peer(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> int:
    """Slots of a buffer for the tokens from another device: the smaller of the two above."""
    balanced = balanced_tokens_per_peer(model, layout, tokens, method)
    return min(tokens_per_peer(model, layout, tokens), balanced)


def hop(model: ModelSizes, tokens: int, method: Method) -> Transfer:
    """Pipeline hop: a micro-batch to the next stage, or its gradient back."""
    return Transfer("micro-batch", "permute", ("pp",), tokens * model.d_model, method.itemsize)


def embedding(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """Collectives of the embedding for one micro-batch, forward and backward.

    Each ``tp`` rank looks up the tokens of its rows; there are none where ``tp`` does not divide
    the vocabulary.
    """
    if not shards_vocabulary(model, layout):
        return []
    size, width = tokens * layout.tp * model.d_model, method.itemsize
    lookup = Transfer("rows of embedding", "reduce_scatter", ("tp",), size, width, gradient=width)
    return drop_empty([lookup, lookup.transposed(layout)], layout)


def head(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """Collectives of the head for one micro-batch, forward and backward.

    Hidden states and next tokens are gathered for the columns that a ``tp`` rank computes; there
    are a maximum and three sums per token, and two in the backward pass.
    """
    size, width, all_tokens = tokens * model.d_model, method.itemsize, tokens * layout.tp
    states = Transfer("states to head", "all_gather", ("tp",), size, width, gradient=width)
    transfers = [
        states,
        Transfer("tokens to head", "all_gather", ("tp",), tokens, INT32),
        Transfer("sums of head", "all_reduce", ("tp",), 4 * all_tokens, FLOAT32),
        Transfer("gradient of sums of head", "all_reduce", ("tp",), 2 * all_tokens, FLOAT32),
        states.transposed(layout),
    ]
    return drop_empty(transfers, layout)


def row_reordering(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method
) -> list[Transfer]:
    """Reordering of the last hidden states after two-batch overlap, forward and backward.

    The ``tp`` ranks hold other tokens in the order of the rows than in the halves. Volume: ``T h
    (tp - 1)`` in each direction; none without halves.
    """
    streams, width = method.streams(batch), method.itemsize
    if len(streams) == 1:
        return []
    sizes = [stream.local_tokens(layout) * model.d_model for stream in streams]
    what = "states of halves"
    gathers = [Transfer(what, "all_gather", ("tp",), size, width, 1, width) for size in sizes]
    return drop_empty([*gathers, *(gather.transposed(layout) for gather in gathers)], layout)


def embed_and_head(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method
) -> tuple[list[Transfer], ...]:
    """`embedding`, `head` and `row_reordering` for one micro-batch."""
    tokens = batch.local_tokens(layout)
    return (
        embedding(model, layout, tokens, method),
        head(model, layout, tokens, method),
        row_reordering(model, layout, batch, method),
    )


def drop_empty(transfers: Iterable[Transfer], layout: Layout) -> list[Transfer]:
    """The transfers that send anything: groups of one device send nothing."""
    return [t for t in transfers if t.group(layout) > 1 and t.bytes]


def repeat_transfers(transfers: Iterable[Transfer], times: int) -> list[Transfer]:
    """The transfers with `times` times as many calls."""
    return [replace(t, times=t.times * times) for t in transfers]


def gather_weights(what: str, group: WeightGroup, layout: Layout, method: Method) -> list[Transfer]:
    """Hierarchical all-gather of the shards of weights (`sharding.zero`).

    It has two stages, across sequence-parallel groups and then inside; a stage of one device is
    left out. The reverse is a reduce-scatter.
    """
    stored, size = group.stored(method), group.shard_size(layout)
    width, gradient = stored.weight_comm, stored.gradient_comm
    across = Transfer(
        what, "all_gather", group.replicas, size, width, gradient=gradient, side="across"
    )
    gathered = size * across.group(layout)
    inside = replace(across, elements=gathered, side="inside")
    return drop_empty([across, inside], layout)


def unsharding(model: ModelSizes, layout: Layout, method: Method) -> tuple[Transfer, ...]:
    """FSDP: all-gather of the weights of all layers of a device, once."""
    transfers = []
    for group in weight_groups(model, layout):
        if group.in_layers:
            transfers += gather_weights(f"shards of {group.what}", group, layout, method)
    return tuple(transfers)


def gradient_reduction(gather: Transfer, layout: Layout, method: Method) -> Transfer:
    """Reverse of an all-gather of weights: reduce-scatter, across in `Method.gradient_wire`."""
    reduction = gather.transposed(layout)
    if method.gradient_wire == "bfloat16" and gather.side == "across":
        reduction = replace(reduction, kind="all_to_all", itemsize=BFLOAT16)
    return reduction


def fully_sharded(model: ModelSizes, layout: Layout, method: Method) -> list[Transfer]:
    """FSDP of a micro-batch: layers gathered forward and backward, gradients reduce-scattered."""
    gathers = unsharding(model, layout, method)
    return repeat_transfers(gathers, 2) + [
        gradient_reduction(gather, layout, method) for gather in gathers
    ]


def gradients(model: ModelSizes, layout: Layout, method: Method) -> list[Transfer]:
    """Collectives once per step (ZeRO-1): reduce-scatter of gradients, all-gather of new weights.

    In total they are as much as an all-reduce, for one dtype. Gradients are reduced inside a
    sequence-parallel group and then across, weights gathered in reverse order; with
    `Execution.overlap_grad_reduce` gradients are reduced layer by layer.
    """
    transfers = []
    for group in weight_groups(model, layout):
        if method.fsdp and group.in_layers:
            continue
        gathers = gather_weights(f"new weights: {group.what}", group, layout, method)
        reductions = [
            replace(gradient_reduction(gather, layout, method), what=f"gradients: {group.what}")
            for gather in reversed(gathers)
        ]
        if method.execution.overlap_grad_reduce and (depth := group.depth):
            reductions = [
                replace(reduction, elements=-(-reduction.elements // depth), times=depth)
                for reduction in reductions
            ]
        transfers += [*reductions, *gathers]
    return transfers


def step(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> list[Transfer]:
    """All collectives of a device in one optimizer step.

    In a pipeline these are a middle stage's, which sends in every tick, with or without work: a
    micro-batch in one and a gradient in the next.
    """
    micro_batches, tokens = batch.num_micro_batches(layout), batch.local_tokens(layout)
    transfers, depth = [], layers_on_device(model, layout)
    for num_layers, has_experts in ((depth, True), (model.num_dense_layers, False)):
        forward, backward = layer(model, layout, batch, method, has_experts)
        transfers += repeat_transfers([*forward, *backward], num_layers)
    if method.fsdp:
        transfers += fully_sharded(model, layout, method)
    transfers += chain(*embed_and_head(model, layout, batch, method))
    transfers = repeat_transfers(transfers, micro_batches)
    if layout.pp > 1:
        ticks = Schedule(layout.pp, micro_batches, layout.vpp).ticks
        transfers += repeat_transfers([hop(model, tokens, method)], ticks)
    return transfers + gradients(model, layout, method)
