"""Exposed communication, with each kind of overlap and without.

Without overlap all communication is exposed. With it the excess over the products is exposed, and
the part that has no product to overlap with: of ``n`` pieces of communication C that may overlap
with ``n`` equal pieces of products P, one has none,

    exposed = max(C / n, C - P (n - 1) / n).

These are lower bounds, the best that the order of a program's operations allows; a scheduler may
not reach them.
"""

from collections.abc import Mapping

IN_HALVES = ("context", "attention and dense layers over tp", "experts")
"""Groups of `sharding.planner.cost.GROUPS` that each half of the rows sends separately."""


def beside_pieces(sent: float, products: float, pieces: int) -> float:
    """Exposed seconds of `sent`, ``max(C / n, C - P (n - 1) / n)``."""
    return max(sent / pieces, sent - products * (pieces - 1) / pieces)


def beside_chunks(experts: float, products: float, chunks: int) -> float:
    """Exposed seconds of the experts' all-to-all, overlapped with products of other chunks.

    See `Method.expert_chunks`. At least one of `chunks` is exposed: the dispatch of the first chunk
    and the return of the last.

    Args:
      products: seconds of the experts' products.
    """
    return beside_pieces(experts, products, chunks)


def beside_halves(sent: Mapping[str, float], products: float, chunks: int) -> dict[str, float]:
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
    halved = {what: sent[what] for what in IN_HALVES if what in sent}
    total = sum(halved.values())
    if not total:
        return dict(sent)
    alone = total / 4 - halved.get("experts", 0.0) * (1 - 1 / chunks) / 4
    shown = max(alone, total - products * 3 / 4)
    return dict(sent) | {what: time * shown / total for what, time in halved.items()}


def beside_backward(summed: float, micro_batch: float, pieces: int, at_once: int = 1) -> float:
    """Exposed seconds of the layers' gradient reduction, after the backward pass has ended.

    See `Method.overlap_grad_reduce`. The reduction of a piece (a chunk of an interleaved pipeline,
    else a layer) starts after the backward pass of its last micro-batch, which takes two thirds of
    a micro-batch's time: ``max(S / n, S - 2/3 t (n - 1) / n)`` of n pieces. The reduction of the
    last piece has nothing to overlap with.

    Args:
      summed: seconds of the reduction of all pieces.
      micro_batch: seconds of a micro-batch forward and backward.
      pieces: n.
      at_once: micro-batches between the ends of the pieces, ``pp`` in an interleaved pipeline.

    References:
      Jin et al., "MegaScale-MoE", 2025, appendix A.1 (communication inside and across groups).
      https://arxiv.org/abs/2505.11432
    """
    return beside_pieces(summed, at_once * micro_batch * 2 / 3, pieces)
