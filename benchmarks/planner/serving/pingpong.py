"""Ping-pong pipeline parallelism: micro-batches alternate between attention and expert devices.

A micro-batch visits four stations in each layer, each of which processes one micro-batch at a time
in the order of arrival: the attention devices (``T_a`` seconds), the network to the experts
(``T_c``), the expert devices (``T_e``) and the network back (``T_c``). With ``m`` micro-batches and
``L`` layers, let

    S = T_a + T_e + 2 T_c          a layer of one micro-batch that never waits,
    X = max(T_a, T_e, T_c)         the busiest station's time for one micro-batch.

The micro-batches circulate in one ring of ``m L`` visits. Where ``m X >= S`` the busiest station
never waits once the first micro-batch has reached it, and starts one visit every ``X``: ``m L - 1``
periods are between its first and its last start, and the time before the first and after the last
adds up to one ``S``. Where ``m X < S`` a micro-batch returns before its turn and finds the first
station free: each completes its layers in ``L S``, the last one ``(m - 1) X`` after the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

STATIONS = ("attention", "send", "experts", "return")
"""Stations that a micro-batch visits in a layer, in order."""


@dataclass(frozen=True)
class Visit:
    """One visit of a micro-batch, both counted from 0."""

    station: str
    layer: int
    micro_batch: int


def order_visits(num_layers: int, num_micro_batches: int) -> Iterator[Visit]:
    """The visits of one token step: layer by layer, micro-batch by micro-batch.

    Each station processes its own part of this list in order. The host enqueues that part for each
    device group, with attention of the next layer before other micro-batches' experts
    (`moe.disaggregated.schedule.order_programs`).

    Examples:
      >>> [f"{work.station[0]}{work.micro_batch}" for work in order_visits(1, 2)]
      ['a0', 's0', 'e0', 'r0', 'a1', 's1', 'e1', 'r1']
    """
    for layer in range(num_layers):
        for micro_batch in range(num_micro_batches):
            for station in STATIONS:
                yield Visit(station, layer, micro_batch)


def _check(num_layers: int, num_micro_batches: int) -> None:
    for name, value in (("num_layers", num_layers), ("num_micro_batches", num_micro_batches)):
        if np.any(np.asarray(value) < 1):
            raise ValueError(f"{name}={value} must be at least 1.")


def makespan(attention, experts, sending, num_micro_batches, num_layers):
    """Seconds of one token step of all micro-batches, in closed form; arguments broadcast.

    ``S + X (m L - 1)`` where ``m X >= S``, else ``L S + (m - 1) X``.

    Args:
      attention: ``T_a``, seconds of a micro-batch in a layer.
      experts: ``T_e``.
      sending: ``T_c``, one way.
      num_micro_batches: m.
      num_layers: L.

    Raises:
      ValueError: without layers or micro-batches.

    References:
      Zhu et al., "MegaScale-Infer", 2025, eq. 5: the first case with ``X = max(T_a, T_e)``.
      https://arxiv.org/abs/2504.02263
    """
    _check(num_layers, num_micro_batches)
    once = attention + experts + 2 * sending
    pace = np.maximum(np.maximum(attention, experts), sending)
    busy = once + pace * (num_micro_batches * num_layers - 1)
    waiting = num_layers * once + (num_micro_batches - 1) * pace
    return np.where(num_micro_batches * pace >= once, busy, waiting)


def micro_batches_needed(attention: float, experts: float, sending: float) -> int:
    """The fewest micro-batches with which the busier devices never wait: ``m X >= S``.

    The paper's ``m >= 2 (1 + T_c / T_f)`` is the same where ``T_a = T_e`` and larger elsewhere.
    """
    once, pace = attention + experts + 2 * sending, max(attention, experts, sending)
    # A quotient such as 3.0000000000000004 is three.
    return max(1, int(np.ceil(once / pace * (1 - 1e-12))))


def simulate(
    attention, experts, sending, num_micro_batches: int, num_layers: int
) -> Float[np.ndarray, "layer micro_batch station *cases"]:
    """Start of each visit in seconds, by event simulation.

    A visit starts when its micro-batch has left the previous station and its station has finished
    the visits before it in `order_visits`. There are no other assumptions, so it is valid for all
    times.

    Args:
      attention: ``T_a``; an array of cases, or one number. Times broadcast.
      experts: ``T_e``.
      sending: ``T_c``.

    Returns:
      Starts of the visits. The makespan is the last one and ``T_c``.
    """
    _check(num_layers, num_micro_batches)
    attention, experts, sending = np.broadcast_arrays(attention, experts, sending)
    lasts = (attention, sending, experts, sending)
    starts = np.zeros((num_layers, num_micro_batches, len(STATIONS), *attention.shape))
    free = [np.zeros(attention.shape) for _ in STATIONS]
    ready = [np.zeros(attention.shape) for _ in range(num_micro_batches)]
    for work in order_visits(num_layers, num_micro_batches):
        station, micro_batch = STATIONS.index(work.station), work.micro_batch
        start = np.maximum(ready[micro_batch], free[station])
        starts[work.layer, micro_batch, station] = start
        free[station] = ready[micro_batch] = start + lasts[station]
    return starts


def gain(ratio: float, num_micro_batches: int, num_layers: int) -> float:
    """Speedup of m micro-batches over m - 1 of the same size, where ``T_a = T_e = T_f``.

    Args:
      ratio: ``T_c / T_f``.
    """
    more, less = (
        m / float(makespan(1.0, 1.0, ratio, m, num_layers))
        for m in (num_micro_batches, num_micro_batches - 1)
    )
    return more / less
