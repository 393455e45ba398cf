"""What every collective of a training step sends: the one statement of it.

Of a layer, of the two ends of the network, of a pipeline and of the gradients. T are the tokens of
a micro-batch on one device, h the model width.
"""

import itertools
import math
import operator
from dataclasses import replace
from itertools import chain

from sharding.folding import Layout
from sharding.folding.layout import prime_factors
from sharding.planner.method import Batch, Method
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.models.weights import held, layers_on_device, spreads_vocabulary
from sharding.planner.transfer import Kind, Transfer, in_fp8, present, repeated, staged
from sharding.schedule import Schedule

FLOAT32 = INT32 = 4
BFLOAT16 = 2


def layer(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, has_experts: bool = True
) -> tuple[list[Transfer], list[Transfer]]:
    """One block forward with one micro-batch, and what its backward pass adds; each of two halves
    of the rows (`Method.streams`) sends for itself.

    Args:
      has_experts: it is one of the layers with experts, not of the dense ones before them.
    """
    parts = []
    for rows in method.streams(batch):
        parts.append(beside_experts(model, layout, rows, method, has_experts))
        if has_experts:
            parts.append(experts(model, layout, rows.local_tokens(layout), method))
    forward, backward = zip(*parts, strict=True)
    return [*chain(*forward)], [*chain(*backward)]


def beside_experts(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, has_experts: bool = True
) -> tuple[list[Transfer], list[Transfer]]:
    """`layer` but for `experts`, for the rows of a micro-batch that go through it together: of the
    layout ``tp`` and ``cp`` alone matter."""
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
    """`dispatch` in a layer, with what its backward pass sends again: of the layout ``ep`` and
    ``etp`` alone matter."""
    sent = dispatch(model, layout, tokens, method) if model.num_experts else ([], [])
    return _with_repeated(*sent, layout, method)


def _with_repeated(
    forward: list[Transfer], backward: list[Transfer], layout: Layout, method: Method
) -> tuple[list[Transfer], list[Transfer]]:
    if method.repeats(method.remat):
        backward = [t for t in forward if t.repeated] + backward
    return present(forward, layout), present(backward, layout)


def tensor_parallel(
    what: str, model: ModelSizes, layout: Layout, tokens: int, method: Method
) -> list[Transfer]:
    """Tokens are gathered for heads or hidden units that are spread over ``tp``, and their parts
    summed: ``2 T h (tp - 1)``, or ``2 b s h (tp - 1) / (tp cp)`` of the whole micro-batch."""
    size, width = tokens * model.d_model, method.itemsize
    there = Transfer(f"tokens to {what}", "all_gather", ("tp",), size, width, 1, width, True)
    size *= layout.tp
    return [there, Transfer(f"sums of {what}", "reduce_scatter", ("tp",), size, width, 1, width)]


def context(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """Keys and values, gathered or passed round, or heads for tokens and back.

    Without norms of queries and keys: with them, what came before the norms is kept, and Ulysses'
    first trade is `repeated` too, as it is where "projections" keeps nothing of it.
    """
    keys, queries, width = tokens * model.keys, tokens * model.queries, method.itemsize

    def of(what: str, kind: Kind, elements: int, repeated: bool = False) -> Transfer:
        return Transfer(what, kind, ("cp",), elements, width, 1, width, repeated)

    if layout.cp == 1:
        return []
    if method.context == "gather":
        return [of(what, "all_gather", keys, repeated=True) for what in ("keys", "values")]
    if method.context == "ring":
        sent = 2 * ring_hops(layout)[0]
        return [replace(of("keys and values", "permute", keys), times=sent, gradient=0)]
    traded = queries + 2 * keys * copies_of_keys(model, layout)
    return [
        of("queries, keys and values", "all_to_all", traded, method.remat == "projections"),
        of("attention's output", "all_to_all", queries, repeated=True),
    ]


def copies_of_keys(model: ModelSizes, layout: Layout) -> int:
    """How often Ulysses repeats each key/value head, so that ``cp`` divides those of a ``tp``
    rank."""
    return layout.cp // math.gcd(model.num_kv_heads // layout.tp, layout.cp)


def ring_backward(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """Keys and values once more, and their gradients, float32, one hop behind them."""
    size, (hops, of_gradients) = 2 * tokens * model.keys, ring_hops(layout)
    what = "keys and values"
    return [
        Transfer(what, "permute", ("cp",), size, method.itemsize, hops),
        Transfer(f"gradient of {what}", "permute", ("cp",), size, FLOAT32, of_gradients),
    ]


def ring_hops(layout: Layout) -> tuple[int, int]:
    """How many times its own shard a device of a ring receives: of keys, and of their gradients,
    which start a hop later and go home.

    ``cp - 1`` of both, but under a pipeline with a ``cp`` that is no power of two: a hop along a
    digit of base ``p`` receives ``p - 1`` shards (`moe.attention.context_parallel.hops.Exchange`).
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
    """How many tokens of each sequence chose each expert, for the balancing loss."""
    counts = sequences * model.num_experts
    return [Transfer("load of sequences", "all_reduce", ("cp", "tp"), counts, FLOAT32)]


def dispatch(
    model: ModelSizes, layout: Layout, tokens: int, method: Method
) -> tuple[list[Transfer], list[Transfer]]:
    """Tokens to the devices of their experts, and sums back, with their ids and probs: forward, and
    backward."""
    per_peer, k = tokens_per_peer(model, layout, tokens), model.experts_per_token
    forward, backward = [], []
    for size, number in chunks_of(tokens, method.expert_chunks):
        slots = min(size, per_peer)
        # Where even routing is what there is room for, as much arrives.
        buffer = None if method.even else layout.ep * slots
        given = size, slots, k, layout, model.d_model, method.itemsize, buffer
        there, back = exchange(method.dispatch, *given, method.activation_wire)
        forward += repeated(there, number)
        backward += repeated(back, number)
    return forward, backward


def chunks_of(tokens: int, chunks: int) -> list[tuple[int, int]]:
    """(tokens, how many chunks have so many), as `moe.experts.dispatch.token_chunks` cuts them."""
    each, more = divmod(tokens, max(1, min(chunks, tokens)))
    less = max(1, min(chunks, tokens)) - more
    return [(size, number) for size, number in ((each + 1, more), (each, less)) if number]


def exchange(
    implementation: str,
    tokens: int,
    per_peer: int,
    k: int,
    layout: Layout,
    d_model: int,
    itemsize: int,
    buffer: int | None = None,
    wire: str | None = None,
) -> tuple[list[Transfer], list[Transfer]]:
    """`token_exchange` and `routing_exchange`, forward and backward.

    Args:
      wire: what tokens, sums and their gradients travel in (`sharding.activation_wire`); None is
        as they are.
    """
    given, is_ragged = (implementation, tokens, per_peer, k, layout), implementation == "ragged"
    moved = token_exchange(*given, d_model, itemsize, buffer)
    routing = routing_exchange(*given, buffer)
    if wire is None:
        both = [*moved, *routing]
        if is_ragged:
            # Backward alone: where slices go in the other buffer, two vectors for each way.
            what = "offsets to experts"
            both.append(Transfer(what, "all_to_all", ("ep",), layout.ep, 0, 4, gradient=INT32))
        return both, [one.transposed(layout) for one in both if one.gradient]
    forward, backward = [], [one.transposed(layout) for one in routing if one.gradient]
    for one in moved:
        there, back = in_fp8(one, layout, d_model, is_ragged and one.kind == "all_to_all")
        forward += there
        backward += back
    return [*forward, *routing], backward


def token_exchange(
    implementation: str,
    tokens: int,
    per_peer: int,
    k: int,
    layout: Layout,
    d_model: int,
    itemsize: int,
    buffer: int | None = None,
) -> list[Transfer]:
    """Tokens to the devices of their experts, and sums back.

    With ``n = ep etp``, in tokens: "all_gather" receives ``2 T (n - 1)``, half of it sums of
    float32; "all_to_all" ``2 R (n - 1)``; "ragged" no more than ``2 T k (ep - 1) / ep`` over ``ep``
    with even routing, and over ``etp`` its whole buffer.

    Args:
      implementation: "all_gather", "all_to_all" or "ragged".
      tokens: T.
      per_peer: R, that a device sends to another where buffers are of one size.
      itemsize: bytes of an element of a token.
      buffer: tokens that "ragged" has room for; None is as many as arrive.
    """
    if implementation == "all_gather":
        group, n, size = ("ep", "etp"), layout.ep * layout.etp, tokens * d_model
        there = Transfer(
            TOKENS, "all_gather", group, size, itemsize, gradient=FLOAT32, repeated=True
        )
        back = Transfer(SUMS, "reduce_scatter", group, n * size, FLOAT32, gradient=itemsize)
        return [there, back]
    sent, received = (
        slots * d_model for slots in _slots(implementation, tokens, per_peer, k, layout, buffer)
    )

    def of(what: str, kind: Kind, axis: str, elements: int, repeated: bool = False) -> Transfer:
        return Transfer(what, kind, (axis,), elements, itemsize, 1, itemsize, repeated)

    return [
        of(TOKENS, "all_to_all", "ep", sent, repeated=True),
        of(f"{TOKENS}, over etp", "all_gather", "etp", received, repeated=True),
        of(f"{SUMS}, over etp", "reduce_scatter", "etp", layout.etp * received),
        of(SUMS, "all_to_all", "ep", sent),
    ]


TOKENS, SUMS = "tokens to experts", "sums of experts"


def routing_exchange(
    implementation: str,
    tokens: int,
    per_peer: int,
    k: int,
    layout: Layout,
    buffer: int | None = None,
) -> list[Transfer]:
    """k ids and k probs of each token of `token_exchange`. They go with it, but those of "ragged"
    go first and to all devices, which count from them what they will be sent."""
    if implementation == "all_gather":
        return _routing("all_gather", ("ep", "etp"), tokens * k)
    sent, received = _slots(implementation, tokens, per_peer, k, layout, buffer)
    if implementation == "ragged":
        moved = _routing("all_gather", ("ep",), tokens * k)
    else:
        moved = _routing("all_to_all", ("ep",), sent * k)
    return [*moved, *_routing("all_gather", ("etp",), received * k)]


def _slots(
    implementation: str, tokens: int, per_peer: int, k: int, layout: Layout, buffer: int | None
) -> tuple[int, int]:
    """Tokens that a device sends to all of ``ep``, itself included, and those that it then has."""
    slots = layout.ep * per_peer
    if implementation != "ragged":
        return slots, slots
    sent = min(slots, tokens * k)
    return sent, sent if buffer is None else buffer


def _routing(kind: Kind, axes: tuple[str, ...], numbers: int) -> list[Transfer]:
    return [
        Transfer("ids of experts", kind, axes, numbers, INT32, repeated=True),
        Transfer("probs of experts", kind, axes, numbers, FLOAT32, gradient=FLOAT32, repeated=True),
    ]


def tokens_per_peer(model: ModelSizes, layout: Layout, tokens: int) -> int:
    """Tokens that a device may send to another where buffers are of one size: ``min(T, C L)``, of L
    experts on a device and a capacity C; T without one."""
    if model.capacity_factor is None:
        return tokens
    average = model.capacity_factor * tokens * model.experts_per_token / model.num_experts
    capacity = min(tokens, math.ceil(round(average, 9)))
    return min(tokens, capacity * (model.num_experts // layout.ep))


def hop(model: ModelSizes, tokens: int, method: Method) -> Transfer:
    """A micro-batch to the next stage, or its gradient back."""
    return Transfer("micro-batch", "permute", ("pp",), tokens * model.d_model, method.itemsize)


def embedding(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """A micro-batch through the embedding and back: each ``tp`` rank finds the tokens of its rows;
    nothing where ``tp`` does not divide these."""
    if not spreads_vocabulary(model, layout):
        return []
    size, width = tokens * layout.tp * model.d_model, method.itemsize
    found = Transfer("rows of embedding", "reduce_scatter", ("tp",), size, width, gradient=width)
    return present([found, found.transposed(layout)], layout)


def head(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> list[Transfer]:
    """A micro-batch through the head and back: states and the tokens after them are gathered for
    the columns that a ``tp`` rank computes; a maximum and three sums for each, and two backward."""
    size, width, all_tokens = tokens * model.d_model, method.itemsize, tokens * layout.tp
    states = Transfer("states to head", "all_gather", ("tp",), size, width, gradient=width)
    found = [
        states,
        Transfer("tokens to head", "all_gather", ("tp",), tokens, INT32),
        Transfer("sums of head", "all_reduce", ("tp",), 4 * all_tokens, FLOAT32),
        Transfer("gradient of sums of head", "all_reduce", ("tp",), 2 * all_tokens, FLOAT32),
        states.transposed(layout),
    ]
    return present(found, layout)


def in_rows(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> list[Transfer]:
    """The last states of two halves back in the order of the rows, where ``tp`` ranks have other
    tokens of these, and their gradients: ``T h (tp - 1)`` each way; nothing without halves."""
    streams, width = method.streams(batch), method.itemsize
    if len(streams) == 1:
        return []
    sizes = [half.local_tokens(layout) * model.d_model for half in streams]
    what = "states of halves"
    found = [Transfer(what, "all_gather", ("tp",), size, width, gradient=width) for size in sizes]
    return present([*found, *(one.transposed(layout) for one in found)], layout)


def unsharding(model: ModelSizes, layout: Layout, method: Method) -> tuple[Transfer, ...]:
    """Under full sharding, the weights of all layers of a device joined, once; the reverse sums
    their gradients."""
    found = []
    for one in held(model, layout):
        if one.in_layers:
            wires = one.stored(method).weight_wire, one.stored(method).gradient_wire
            given = one.replicas, layout, one.part(layout)
            found += staged(f"shards of {one.what}", *given, *wires)
    return tuple(found)


def summed_back(joined: Transfer, layout: Layout, method: Method) -> Transfer:
    """The sum into shards of the gradients of weights that were joined from them: across sequence-
    parallel groups in `Method.gradient_wire`."""
    summed = joined.transposed(layout)
    if method.gradient_wire == "bfloat16" and joined.side == "across":
        summed = replace(summed, kind="all_to_all", itemsize=BFLOAT16)
    return summed


def gradients(model: ModelSizes, layout: Layout, method: Method) -> list[Transfer]:
    """Once in a step: gradients summed into the shards that the optimizer keeps, and new weights
    joined (ZeRO-1): together as much as an all-reduce of numbers of one width.

    Gradients go inside a sequence-parallel group and then across, weights the other way; with
    `Method.overlap_grad_reduce` those of each layer by themselves.
    """
    found = []
    for one in held(model, layout):
        if method.fsdp and one.in_layers:
            continue
        wires = one.stored(method).weight_wire, one.stored(method).gradient_wire
        joined = staged(f"new weights: {one.what}", one.replicas, layout, one.part(layout), *wires)
        summed = [
            replace(summed_back(back, layout, method), what=f"gradients: {one.what}")
            for back in reversed(joined)
        ]
        if method.overlap_grad_reduce and one.depth:
            summed = [
                replace(back, elements=-(-back.elements // one.depth), times=one.depth)
                for back in summed
            ]
        found += [*summed, *joined]
    return found


def step(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> list[Transfer]:
    """Everything that a device gives to collectives in one optimizer step.

    In a pipeline these are a middle stage's, which hands on in every tick, with or without work: a
    micro-batch in one and a gradient in the next.
    """
    micro_batches, tokens = batch.num_micro_batches(layout), batch.local_tokens(layout)
    found, depth = [], layers_on_device(model, layout)
    for number, has_experts in ((depth, True), (model.num_dense_layers, False)):
        forward, backward = layer(model, layout, batch, method, has_experts)
        found += repeated([*forward, *backward], number)
    if method.fsdp:
        joined = list(unsharding(model, layout, method))
        found += repeated(joined, 2) + [summed_back(one, layout, method) for one in joined]
    found += embedding(model, layout, tokens, method) + head(model, layout, tokens, method)
    found += in_rows(model, layout, batch, method)
    found = repeated(found, micro_batches)
    if layout.pp > 1:
        ticks = Schedule(layout.pp, micro_batches, layout.vpp).ticks
        found += repeated([hop(model, tokens, method)], ticks)
    return found + gradients(model, layout, method)
