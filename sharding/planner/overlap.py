"""Exposed communication, with each kind of overlap and without.

Without overlap all communication is exposed. With it the excess over the products is exposed, and
the part that has no product to overlap with: of ``n`` pieces of communication C that may overlap
with ``n`` equal pieces of products P, one has none,

    exposed = max(C / n, C - P (n - 1) / n).

These are lower bounds, the best that the order of a program's operations allows; a scheduler may
not reach them.
"""

from collections.abc import Mapping

STREAM_GROUPS = ("context", "attention and dense layers over tp", "experts")
"""Groups of `sharding.planner.cost.TRANSFER_GROUPS` that each half of the rows sends separately."""


def exposed_seconds(sent: float, products: float, segments: int) -> float:
    """Exposed seconds of `sent`, ``max(C / n, C - P (n - 1) / n)``."""
    return max(sent / segments, sent - products * (segments - 1) / segments)


def exposed_with_chunks(experts: float, products: float, chunks: int) -> float:
    """Exposed seconds of the experts' all-to-all, overlapped with products of other chunks.

    See `Method.expert_chunks`. At least one of `chunks` is exposed: the dispatch of the first chunk
    and the return of the last.

    Args:
      products: seconds of the experts' products.
    """
    return exposed_seconds(experts, products, chunks)


def exposed_with_two_batches(
    sent: Mapping[str, float], products: float, chunks: int
) -> dict[str, float]:
    """Exposed seconds of each kind of a micro-batch's communication under two-batch overlap.

    One half of the rows communicates while the other computes (`Method.two_batch_overlap`). A pass
    through a layer has five phases, of which the middle three overlap both: attention of the first
    half; attention of the second with dispatch of the first; experts of the first with dispatch of
    the second; experts of the second with combine of the first; combine of the second. Of four
    equal pieces of communication one is exposed, and as layers run in a loop it is in each of them:
    n is 4. If the experts' exposed piece is in chunks, only its last chunk is exposed.

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
    reduction_seconds: float, micro_batch: float, segments: int, interval: int = 1
) -> float:
    """Exposed seconds of the layers' gradient reduction, after the backward pass has ended.

    See `Method.overlap_grad_reduce`. The reduction of a piece (a chunk of an interleaved pipeline,
    else a layer) starts after the backward pass of its last micro-batch, which takes two thirds of
    a micro-batch's time: ``max(S / n, S - 2/3 t (n - 1) / n)`` of n pieces. The reduction of the
    last piece has nothing to overlap with.

    Args:
      reduction_seconds: seconds of the reduction of all pieces.
      micro_batch: seconds of a micro-batch forward and backward.
      segments: n.
      interval: micro-batches between the ends of the pieces, ``pp`` in an interleaved pipeline.

    References:
      Jin et al., "MegaScale-MoE", 2025, appendix A.1 (communication inside and across groups).
      https://arxiv.org/abs/2505.11432
    """
    return exposed_seconds(reduction_seconds, interval * micro_batch * 2 / 3, segments)
