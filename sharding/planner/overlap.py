"""What shows of communication that runs beside products, with each kind of overlap and without.

Without overlap all of it shows. With it what products do not last for shows, and what has no
product beside it: of ``n`` pieces of communication C that may go on beside ``n`` equal pieces of
products P, one has none,

    exposed = max(C / n, C - P (n - 1) / n).

How much of this a scheduler reaches is another question: these are the best that the order of a
program's operations allows.
"""

from collections.abc import Mapping

IN_HALVES = ("context", "attention and dense layers over tp", "experts")
"""Of what is sent, by `sharding.planner.cost.GROUPS`, that which halves send by themselves."""


def beside_pieces(sent: float, products: float, pieces: int) -> float:
    """Seconds of `sent` that show, ``max(C / n, C - P (n - 1) / n)``."""
    return max(sent / pieces, sent - products * (pieces - 1) / pieces)


def beside_chunks(experts: float, products: float, chunks: int) -> float:
    """Seconds of the experts' communication that show where chunks of tokens travel beside each
    other's products (`Method.expert_chunks`): one of `chunks` is at least the first chunk's way out
    and the last one's back.

    Args:
      products: seconds of the experts' products.
    """
    return beside_pieces(experts, products, chunks)


def beside_halves(sent: Mapping[str, float], products: float, chunks: int) -> dict[str, float]:
    """Seconds that show of each part of a micro-batch's communication where one half of its rows
    sends while the other is multiplied (`Method.two_batch_overlap`).

    A pass through a layer has five phases, of which the middle ones have both: the first half's
    attention; the other's beside the first one's way to the experts; the first one's experts beside
    the other's way to them; the other's experts beside the first one's way back; the other's way
    back. Of four equal pieces one is alone, and as layers run in a loop it is in each of them: n is
    4. Of the experts' piece that is alone, in chunks, the last chunk is.

    Args:
      sent: seconds without overlap.
      products: seconds of the layers' products.
      chunks: of tokens that travel to the experts by themselves.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4.1 (attention of one micro-batch
      beside the way to the experts and back of another). https://arxiv.org/abs/2412.19437
    """
    halved = {what: sent[what] for what in IN_HALVES if what in sent}
    total = sum(halved.values())
    if not total:
        return dict(sent)
    alone = total / 4 - halved.get("experts", 0.0) * (1 - 1 / chunks) / 4
    shown = max(alone, total - products * 3 / 4)
    return dict(sent) | {what: time * shown / total for what, time in halved.items()}


def beside_backward(summed: float, micro_batch: float, pieces: int, at_once: int = 1) -> float:
    """Seconds of the sums of the layers' gradients that are left when the backward pass has ended
    (`Method.overlap_grad_reduce`).

    Those of a piece (a chunk of an interleaved pipeline, else a layer) start when its last micro-
    batch has gone backward, two thirds of whose time is that: ``max(S / n, S - 2/3 t (n - 1) / n)``
    of n pieces. The last piece's have nothing left to hide under.

    Args:
      summed: seconds of all of them.
      micro_batch: seconds of a micro-batch forward and backward.
      pieces: n.
      at_once: micro-batches that the pieces end apart, ``pp`` in an interleaved pipeline.

    References:
      Jin et al., "MegaScale-MoE", 2025, appendix A.1 (what is sent inside and across groups).
      https://arxiv.org/abs/2505.11432
    """
    return beside_pieces(summed, at_once * micro_batch * 2 / 3, pieces)
