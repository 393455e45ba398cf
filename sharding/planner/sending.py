"""Which contexts, dispatches and wires a search must look at, for a layout and a micro-batch.

One that sends later than another is worth a look where less of it goes through memory, or where it
keeps less, so that it fits or computes less again. What another beats in all of these is not.
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
"""Ways that are worth a look, each with whether it may take least time."""


class Numbers(NamedTuple):
    """What a way takes, of a layer and a micro-batch on one device.

    Attributes:
      sent: seconds of communication.
      passes: seconds that all that is made takes through memory once.
      memory: bytes of activations, under each rematerialisation, and scores.
    """

    sent: float
    passes: float
    memory: tuple[float, ...]


class Case(NamedTuple):
    """What a way is looked at for.

    Attributes:
      model: the network.
      layout: of which what a way has no say in may be left out.
      method: how else it is run.
      hardware: what it runs on.
      remats: rematerialisations that are asked about.
    """

    model: ModelSizes
    layout: Layout
    method: Method
    hardware: Hardware
    remats: tuple[str, ...]

    def on(self, layout: Layout, way: Way) -> "Case":
        """The same on another layout, run in this way."""
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
    """Of a layout with attention's axes alone: with others all numbers are more by as much."""
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
    """The same of one with the experts' axes alone."""
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
    # Of what is sent that which shows: all, or what is left where most of it is hidden.
    shown = {1.0, 0.0 if system.hides_chunks or system.hides_halves else 1.0 - system.hidden}
    in_time, in_all = list[tuple[tuple[float, ...], Way]](), list[tuple[tuple[float, ...], Way]]()
    for own, way in ways:
        time = tuple(n * own.passes + part * own.sent for n in crossings for part in shown)
        in_time.append((time, way))
        in_all.append(((*time, *own.memory), way))
    quick = _unbeaten(in_time)
    return [(way, way in quick) for way in _unbeaten(in_all)]


def _unbeaten(ways: Iterable[tuple[tuple[float, ...], Way]]) -> list[Way]:
    """Those of which no other has all numbers, or less; the first of equals, by their numbers."""
    found: list[tuple[tuple[float, ...], Way]] = []
    for own, way in sorted(ways, key=lambda pair: pair[0]):
        if not any(all(map(operator.le, other, own)) for other, _ in found):
            found.append((own, way))
    return [way for _, way in found]
