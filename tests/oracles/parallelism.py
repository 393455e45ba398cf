"""Formulas of the papers as printed, in their symbols; `volumes` is compared with them.

Sizes: b sequences of a micro-batch, s tokens of each, h the model width, n devices of a group, k
experts of a token, m query heads of a key/value head, f the hidden width of an expert over h.
Volumes are elements that a device sends in the forward pass of a layer.

References:
  Jin et al., "MegaScale-MoE", 2025. https://arxiv.org/abs/2505.11432
  Liu et al., "MoE Parallel Folding", 2025. https://arxiv.org/abs/2504.14960
"""


def tensor_parallel(b: int, s: int, h: int, n: int) -> float:
    """MegaScale-MoE (1), attention, and (4), feed-forward: ``2 b s h (n - 1) / n``.

    (4) is also the volume of the experts' all-gather and reduce-scatter, for any k.
    """
    return 2 * b * s * h * (n - 1) / n


def sequence_parallel_printed(b: int, s: int, h: int, n: int, m: int) -> float:
    """MegaScale-MoE (2), Ulysses attention, as it is printed: twice `sequence_parallel_counted`."""
    return tensor_parallel(b, s, h, n) * (2 + 2 / m) / n


def sequence_parallel_counted(b: int, s: int, h: int, n: int, m: int) -> float:
    """Volume of Ulysses attention, counted as (1), (3) and (4) are.

    It is the volume of queries, keys and values (``1 + 2 / m``) and the output (1), each ``b s h /
    n`` times ``(n - 1) / n``.
    """
    return b * s * h / n * (n - 1) / n * (2 + 2 / m)


def expert_parallel(b: int, s: int, h: int, n: int, k: int) -> float:
    """MegaScale-MoE (3), all-to-all to the experts and back: ``2 (k / n) b s h (n - 1) / n``."""
    return 2 * k / n * b * s * h * (n - 1) / n


def attention_synchronisation(parameters: float, n: int, d: int) -> tuple[float, float]:
    """MegaScale-MoE A.1: volume for gradients and new weights of attention, outside and inside.

    Attention is replicated on n devices of each of d servers. A device sends ``2 (P / n) (d - 1) /
    d`` outside and ``2 P (n - 1) / n`` inside its server. Sharded over n devices (tensor
    parallelism) it sends the first only.
    """
    return 2 * parameters / n * (d - 1) / d, 2 * parameters * (n - 1) / n


def scale_up_ratio(d_expert: int, bandwidth: float, peak: float, n: int | None = None) -> float:
    """MegaScale-MoE section 7: time of an expert's products over time of its communication.

    ``3 / 2 d_expert bandwidth / peak n / (n - 1)``; above 1 communication can be fully overlapped.

    Args:
      bandwidth: bytes/s one way.
      peak: FLOP/s.
      n: devices of the group; None is many.
    """
    return 1.5 * d_expert * bandwidth / peak * (1.0 if n is None else n / (n - 1))


def activations(b: int, s: int, h: int, n: int, k: int, f: float, m: int, selective: bool) -> float:
    """MegaScale-MoE 3.3: elements that a layer keeps for its backward pass, ``(2 n + 2 k + 3 k f +
    12 + 5 / m) b s h / n``, or after selective rematerialisation ``(2 k f + 4 + 2 / m) b s h / n``.
    """
    elements = 2 * k * f + 4 + 2 / m if selective else 2 * n + 2 * k + 3 * k * f + 12 + 5 / m
    return elements * b * s * h / n


def expert_exchange(tokens: int, k: int, h: int, ep: int) -> float:
    """Folding: all-to-all to the experts and back, of `tokens` tokens on a device."""
    return 2 * tokens * k * h * (ep - 1) / ep


def expert_tensor_exchange(tokens: int, k: int, h: int, etp: int) -> float:
    """Folding: volume that ``etp`` adds, an all-gather and a reduce-scatter of received rows."""
    return 2.0 * tokens * k * h * (etp - 1)
