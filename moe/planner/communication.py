"""Communication of a step in seconds: of its layers, embedding and head, gradients and weights.

What of it is exposed is here too. A search needs the same layer under many layouts: results are
cached by what they depend on only, attention by ``tp`` and ``cp``, experts by ``ep`` and ``etp``.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from moe.planner import volumes
from moe.planner.method import Batch, Method, for_tokens
from moe.planner.models import ModelSizes, layers_on_deepest_stage, single_chunk, weight_groups
from sharding.costs.hardware import Hardware
from sharding.costs.transfer import Transfer, group_strides
from sharding.folding import Layout

Timed = tuple[tuple[str, float], ...]
"""Names of collectives, and the seconds of each."""

TRANSFER_GROUPS = (
    ("context", ("keys", "values", "queries", "attention's output")),
    ("attention and dense layers over tp", ("attention", "dense layer", "shared expert")),
    ("experts", ("experts", "load")),
    ("vocabulary", ("head", "embedding")),
    ("row order", ("halves",)),
)
"""Names of groups of transfers, by the words in the transfers' names."""
STREAM_GROUPS = ("context", "attention and dense layers over tp", "experts")
"""Groups that each half of the rows sends separately under two-batch overlap."""


def micro_batch_seconds(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> dict[str, float]:
    """Seconds of a micro-batch's communication without pipeline hops: layers, embedding, head."""
    in_layer, in_embed_and_head = _seconds_by_group(
        model, single_chunk(layout), batch, for_tokens(method), hardware
    )
    layers = layers_on_deepest_stage(model, layout)
    seconds_by_name = {name: layers * seconds for name, seconds in in_layer}
    for name, seconds in in_embed_and_head:
        seconds_by_name[name] = seconds_by_name.get(name, 0.0) + seconds
    return seconds_by_name


@functools.lru_cache(maxsize=1024)
def _seconds_by_group(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> tuple[Timed, Timed]:
    """Seconds of `TRANSFER_GROUPS` for a micro-batch: in one layer, and in embedding and head."""
    return (
        _sum_by_group(layer_times(model, layout, batch, method, hardware)),
        _sum_by_group(embed_and_head_times(model, layout, batch, method, hardware)),
    )


def _sum_by_group(times: Timed) -> Timed:
    groups = defaultdict[str, float](float)
    for what, seconds in times:
        groups[_group_name(what)] += seconds
    return tuple(groups.items())


@functools.lru_cache(maxsize=256)
def _group_name(what: str) -> str:
    return next(name for name, words in TRANSFER_GROUPS if any(word in what for word in words))


@functools.lru_cache(maxsize=1024)
def step_seconds(
    model: ModelSizes, layout: Layout, method: Method, hardware: Hardware
) -> tuple[float, float, float]:
    """Seconds of communication once per step: the reduction of the layers' gradients, the reduction
    of the embedding's and head's gradients, and the all-gather of new weights."""
    embed_and_head_names = {
        f"gradients: {group.what}" for group in weight_groups(model, layout) if not group.depth
    }
    sent = volumes.gradients(model, layout, method)
    gathers = [transfer for transfer in sent if transfer.kind == "all_gather"]
    reductions = [transfer for transfer in sent if transfer.kind != "all_gather"]
    embed_and_head = [t for t in reductions if t.what in embed_and_head_names]
    layers = [t for t in reductions if t.what not in embed_and_head_names]
    return (
        _total_seconds(layers, layout, hardware),
        _total_seconds(embed_and_head, layout, hardware),
        _total_seconds(gathers, layout, hardware),
    )


@functools.lru_cache(maxsize=1024)
def fully_sharded_seconds(
    model: ModelSizes, layout: Layout, method: Method, hardware: Hardware
) -> float:
    """Seconds of FSDP per micro-batch: layers gathered twice, their gradients reduce-scattered."""
    return _total_seconds(volumes.fully_sharded(model, layout, method), layout, hardware)


def _total_seconds(transfers: Iterable[Transfer], layout: Layout, hardware: Hardware) -> float:
    return sum((transfer.seconds(layout, hardware) for transfer in transfers), 0.0)


def layer_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> Timed:
    """Times of the transfers of `moe.planner.volumes.layer`, forward and backward."""
    passes = []
    for rows in method.streams(batch):
        passes.append(non_expert_times(model, layout, rows, method, hardware))
        tokens = rows.local_tokens(layout)
        passes.append(expert_times(model, layout, tokens, method, hardware))
    return tuple(chain.from_iterable(chain(*direction) for direction in zip(*passes, strict=True)))


@functools.lru_cache(maxsize=2**15)
def _times(
    collectives: Callable[..., Iterable[list[Transfer]]],
    model: ModelSizes,
    layout: Layout,
    rows: Batch | int,
    method: Method,
    hardware: Hardware,
) -> tuple[Timed, ...]:
    """Times of each list of transfers that a function of `moe.planner.volumes` returns."""
    return tuple(
        tuple((transfer.what, transfer.seconds(layout, hardware)) for transfer in transfers)
        for transfers in collectives(model, layout, rows, method)
    )


def non_expert_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> tuple[Timed, ...]:
    """Times of `moe.planner.volumes.non_expert`, forward and backward."""
    # The hops of a ring differ under a pipeline.
    if method.context != "ring" or layout.pp == 1:
        layout = reduced_layouts(layout)[0]
    return _times(volumes.non_expert, model, layout, batch, for_tokens(method), hardware)


def expert_times(
    model: ModelSizes, layout: Layout, tokens: int, method: Method, hardware: Hardware
) -> tuple[Timed, ...]:
    """Times of `moe.planner.volumes.experts`, forward and backward."""
    layout = reduced_layouts(layout)[1]
    return _times(volumes.experts, model, layout, tokens, for_tokens(method), hardware)


def embed_and_head_times(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, hardware: Hardware
) -> Timed:
    """Times of `moe.planner.volumes.embed_and_head`."""
    layout, method = reduced_layouts(layout)[0], for_tokens(method)
    return tuple(chain(*_times(volumes.embed_and_head, model, layout, batch, method, hardware)))


@functools.lru_cache(maxsize=1024)
def reduced_layouts(layout: Layout) -> tuple[Layout, Layout]:
    """Reduced layouts with ``tp cp`` and with ``ep etp`` only, as keys of the caches.

    Where the groups over these axes span other ranks than in the full layout, it is the full one.
    """
    full = single_chunk(layout)
    attention = Layout(tp=layout.tp, cp=layout.cp)
    experts = Layout(dp=layout.ep * layout.etp, ep=layout.ep, etp=layout.etp)
    return (
        attention if _span_same_groups(("tp",), ("cp",), attention, full) else full,
        experts if _span_same_groups(("etp",), ("ep",), experts, full) else full,
    )


def _span_same_groups(
    inner: tuple[str, ...], outer: tuple[str, ...], reduced: Layout, full: Layout
) -> bool:
    groups = inner, outer, (*outer, *inner)
    return all(
        group_strides(axes, None, reduced) == group_strides(axes, None, full) for axes in groups
    )


def exposed_seconds(sent: float, products: float, segments: int) -> float:
    """Exposed seconds of communication that overlaps with products.

    The excess over the products is exposed, and the part that has no product to overlap with: of
    ``n`` pieces of communication C that may overlap with ``n`` equal pieces of products P, one has
    none,

        exposed = max(C / n, C - P (n - 1) / n).

    That is a lower bound, the best that the order of a program's operations allows; a scheduler may
    not reach it.
    """
    return max(sent / segments, sent - products * (segments - 1) / segments)


def exposed_with_two_batches(
    sent: Mapping[str, float], products: float, chunks: int
) -> dict[str, float]:
    """Exposed seconds of each kind of a micro-batch's communication under two-batch overlap.

    One half of the rows communicates while the other computes (`Execution.two_batch_overlap`). A
    pass through a layer has five phases, of which the middle three overlap both: attention of the
    first half; attention of the second with dispatch of the first; experts of the first with
    dispatch of the second; experts of the second with combine of the first; combine of the second.
    Of four equal pieces of communication one is exposed, and as layers run in a loop it is in each
    of them: n is 4. If the experts' exposed piece is in chunks, only its last chunk is exposed.

    Args:
      sent: seconds without overlap.
      products: seconds of the layers' products.
      chunks: number of chunks in which tokens are dispatched to the experts.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4.1 (attention of one micro-batch
      overlapped with dispatch and combine of another). https://arxiv.org/abs/2412.19437
    """
    overlapped = {what: sent[what] for what in STREAM_GROUPS if what in sent}
    total = sum(overlapped.values())
    if not total:
        return dict(sent)
    not_overlapped = total / 4 - overlapped.get("experts", 0.0) * (1 - 1 / chunks) / 4
    exposed = max(not_overlapped, total - products * 3 / 4)
    return dict(sent) | {what: time * exposed / total for what, time in overlapped.items()}


def exposed_reduction(
    reduction_seconds: float,
    micro_batch: float,
    model: ModelSizes,
    layout: Layout,
    num_micro_batches: int,
) -> float:
    """Exposed seconds of the layers' gradient reduction, after the backward pass has ended.

    See `Execution.overlap_grad_reduce`. The reduction of a piece (a chunk of an interleaved
    pipeline, else a layer) starts after the backward pass of its last micro-batch, which takes two
    thirds of a micro-batch's time: ``max(S / n, S - 2/3 t (n - 1) / n)`` of n pieces. The reduction
    of the last piece has nothing to overlap with.

    Args:
      reduction_seconds: seconds of the reduction of all pieces.
      micro_batch: seconds of a micro-batch forward and backward.

    References:
      Jin et al., "MegaScale-MoE", 2025, appendix A.1 (communication inside and across groups).
      https://arxiv.org/abs/2505.11432
    """
    depth = max(model.num_layers // layout.pp, 1)
    # Pieces, and micro-batches between their ends.
    segments, interval = depth, 1
    if layout.vpp > 1:
        segments, interval = layout.vpp, min(layout.pp, num_micro_batches)
    return exposed_seconds(reduction_seconds, interval * micro_batch * 2 / 3, segments)
