"""Pruning of a search's contexts, dispatches and communication dtypes, by Pareto dominance.

A candidate that sends longer than another is kept if it has less memory traffic, or if it keeps
less in memory, so that it fits or recomputes less. A candidate that another beats in all of these
is dropped.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sharding.folding import Layout
from sharding.planner import links
from sharding.planner.cost import System, passing, times_through_memory
from sharding.planner.hardware import Hardware
from sharding.planner.memory import activation_bytes
from sharding.planner.method import Batch, Method, varied
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.scores import scores_at_work, scores_kept

Way = dict[str, str | None]
"""Fields of a `Method`."""
Worth = list[tuple[Way, bool]]
"""Candidates, each with true if it may take the least time."""


class Numbers(NamedTuple):
    """Costs of a candidate, for a layer and a micro-batch on one device.

    Attributes:
      sent: seconds of communication.
      passes: seconds of one memory access of all computed values.
      memory: bytes of activations, under each rematerialisation, and scores.
    """

    sent: float
    passes: float
    memory: tuple[float, ...]


class Case(NamedTuple):
    """Conditions under which candidates are compared; a cache key.

    Attributes:
      model: the network.
      layout: axes that do not affect the comparison may be left out.
      method: all other settings.
      hardware: of the cluster.
      remats: rematerialisations that may be chosen.
    """

    model: ModelSizes
    layout: Layout
    method: Method
    hardware: Hardware
    remats: tuple[str, ...]

    def on(self, layout: Layout, way: Way) -> "Case":
        """The case with another layout and the candidate's fields in the method."""
        return self._replace(layout=layout, method=varied(self.method, **way))


def contexts_worth_a_look(case: Case, batch: Batch, system: System, names: Sequence[str]) -> Worth:
    model, layout = case.model, case.layout
    if layout.cp == 1:
        return [({}, True)]
    # Ulysses spreads the query heads of a tp rank over cp.
    spreads = model.num_heads // layout.tp % layout.cp == 0
    ways: list[Way] = [{"context": name} for name in names if spreads or name != "ulysses"]
    alike = links.alike(layout)[0]
    found = [(_of_context(case.on(alike, way), batch), way) for way in ways]
    return _worth_a_look(found, case.remats, system)


def wires_worth_a_look(
    case: Case,
    batch: Batch,
    system: System,
    dispatches: Sequence[str],
    wires: Sequence[str | None],
) -> Worth:
    layout = case.layout
    if layout.ep * layout.etp == 1:
        return [({}, True)]
    alike = links.alike(layout)[1]
    streams = tuple(one.local_tokens(layout) for one in case.method.streams(batch))
    ways: list[Way] = [
        {"dispatch": dispatch, "activation_wire": wire}
        for dispatch, wire in itertools.product(dispatches, wires)
    ]
    found = [(_of_wire(case.on(alike, way), streams), way) for way in ways]
    return _worth_a_look(found, case.remats, system)


@functools.lru_cache(maxsize=4096)
def _of_context(case: Case, batch: Batch) -> Numbers:
    """Costs of a context, by a layout with attention's axes only.

    Further axes add the same to all candidates.
    """
    model, layout, method = case.model, case.layout, case.method
    streams = method.streams(batch)
    sent = [links.beside_experts(model, layout, one, method, case.hardware) for one in streams]
    scores = (
        scores_kept(model, layout, batch, varied(method, remat="none")),
        scores_at_work(model, layout, batch, method),
    )
    return _numbers(case, batch.local_tokens(layout), sent, scores)


@functools.lru_cache(maxsize=4096)
def _of_wire(case: Case, streams: tuple[int, ...]) -> Numbers:
    """Costs of dispatch and communication dtype, by a layout with the experts' axes only."""
    given = case.method, case.hardware
    sent = [links.experts(case.model, case.layout, tokens, *given) for tokens in streams]
    return _numbers(case, sum(streams), sent, ())


def _numbers(
    case: Case,
    tokens: int,
    sent: Iterable[tuple[links.Timed, links.Timed]],
    scores: tuple[float, ...],
) -> Numbers:
    given = case.model, case.layout, tokens, case.method
    seconds = sum(time for passes in sent for timed in passes for _, time in timed)
    of_layer = [activation_bytes(*given, remat) for remat in dict.fromkeys(("none", *case.remats))]
    passes = passing(*given) / case.hardware.memory_bandwidth
    return Numbers(seconds, passes, (*of_layer, *scores))


def _worth_a_look(
    ways: Sequence[tuple[Numbers, Way]], remats: Sequence[str], system: System
) -> Worth:
    crossings = {times_through_memory(remat) for remat in remats}
    # Exposed shares of communication: all of it, or the rest where most of it is overlapped.
    shown = {1.0, 0.0 if system.hides_chunks or system.hides_halves else 1.0 - system.hidden}
    in_time, in_all = list[tuple[tuple[float, ...], Way]](), list[tuple[tuple[float, ...], Way]]()
    for own, way in ways:
        time = tuple(n * own.passes + part * own.sent for n in crossings for part in shown)
        in_time.append((time, way))
        in_all.append(((*time, *own.memory), way))
    quick = _unbeaten(in_time)
    return [(way, way in quick) for way in _unbeaten(in_all)]


def _unbeaten(ways: Iterable[tuple[tuple[float, ...], Way]]) -> list[Way]:
    """The Pareto front: candidates that no other equals or beats in all numbers; one of equals."""
    found: list[tuple[tuple[float, ...], Way]] = []
    for own, way in sorted(ways, key=lambda pair: pair[0]):
        if not any(all(map(operator.le, other, own)) for other, _ in found):
            found.append((own, way))
    return [way for _, way in found]
