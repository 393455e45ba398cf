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

from sharding.costs.hardware import Hardware
from sharding.folding import Layout
from sharding.planner import communication
from sharding.planner.cost import System, times_through_memory, value_bytes
from sharding.planner.memory import activation_bytes, saved_score_bytes, working_score_bytes
from sharding.planner.method import Batch, Method, with_fields
from sharding.planner.models import ModelSizes

Fields = dict[str, str | None]
"""Fields of a `Method`."""
Candidates = list[tuple[Fields, bool]]
"""Candidates, each with true if it may take the least time."""


class Costs(NamedTuple):
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

    def with_layout(self, layout: Layout, fields: Fields) -> "Case":
        """The case with another layout and the candidate's fields in the method."""
        return self._replace(layout=layout, method=with_fields(self.method, **fields))


def candidate_contexts(
    case: Case, batch: Batch, system: System, names: Sequence[str]
) -> Candidates:
    model, layout = case.model, case.layout
    if layout.cp == 1:
        return [({}, True)]
    # Ulysses spreads the query heads of a tp rank over cp.
    shards_heads = model.num_heads // layout.tp % layout.cp == 0
    candidates: list[Fields] = [
        {"context": name} for name in names if shards_heads or name != "ulysses"
    ]
    reduced = communication.reduced_layouts(layout)[0]
    costs = [
        (_context_costs(case.with_layout(reduced, fields), batch), fields) for fields in candidates
    ]
    return _prune(costs, case.remats, system)


def candidate_dispatches(
    case: Case,
    batch: Batch,
    system: System,
    dispatches: Sequence[str],
    comm_dtypes: Sequence[str | None],
) -> Candidates:
    layout = case.layout
    if layout.ep * layout.etp == 1:
        return [({}, True)]
    reduced = communication.reduced_layouts(layout)[1]
    streams = tuple(rows.local_tokens(layout) for rows in case.method.streams(batch))
    candidates: list[Fields] = [
        {"dispatch": dispatch, "activation_wire": comm_dtype}
        for dispatch, comm_dtype in itertools.product(dispatches, comm_dtypes)
    ]
    costs = [
        (_dispatch_costs(case.with_layout(reduced, fields), streams), fields)
        for fields in candidates
    ]
    return _prune(costs, case.remats, system)


@functools.lru_cache(maxsize=4096)
def _context_costs(case: Case, batch: Batch) -> Costs:
    """Costs of a context, by a layout with attention's axes only.

    Further axes add the same to all candidates.
    """
    model, layout, method = case.model, case.layout, case.method
    streams = method.streams(batch)
    sent = [
        communication.non_expert_times(model, layout, rows, method, case.hardware)
        for rows in streams
    ]
    scores = (
        saved_score_bytes(model, layout, batch, with_fields(method, remat="none")),
        working_score_bytes(model, layout, batch, method),
    )
    return _costs(case, batch.local_tokens(layout), sent, scores)


@functools.lru_cache(maxsize=4096)
def _dispatch_costs(case: Case, streams: tuple[int, ...]) -> Costs:
    """Costs of dispatch and communication dtype, by a layout with the experts' axes only."""
    sent = [
        communication.expert_times(case.model, case.layout, tokens, case.method, case.hardware)
        for tokens in streams
    ]
    return _costs(case, sum(streams), sent, ())


def _costs(
    case: Case,
    tokens: int,
    sent: Iterable[tuple[communication.Timed, communication.Timed]],
    scores: tuple[float, ...],
) -> Costs:
    model, layout, method = case.model, case.layout, case.method
    seconds = sum(time for passes in sent for timed in passes for _, time in timed)
    layer_bytes = [
        activation_bytes(model, layout, tokens, method, remat)
        for remat in dict.fromkeys(("none", *case.remats))
    ]
    passes = value_bytes(model, layout, tokens, method) / case.hardware.memory_bandwidth
    return Costs(seconds, passes, (*layer_bytes, *scores))


def _prune(
    candidates: Sequence[tuple[Costs, Fields]], remats: Sequence[str], system: System
) -> Candidates:
    num_accesses = {times_through_memory(remat) for remat in remats}
    # Exposed shares of communication: all of it, or the rest where most of it is overlapped.
    hides_most = system.hides_chunks or system.hides_two_batch or system.hides_experts
    exposed_shares = {1.0, 0.0 if hides_most else 1.0 - system.hidden}
    in_time = list[tuple[tuple[float, ...], Fields]]()
    in_all = list[tuple[tuple[float, ...], Fields]]()
    for costs, fields in candidates:
        time = tuple(
            n * costs.passes + exposed * costs.sent
            for n in num_accesses
            for exposed in exposed_shares
        )
        in_time.append((time, fields))
        in_all.append(((*time, *costs.memory), fields))
    quick = _pareto_front(in_time)
    return [(fields, fields in quick) for fields in _pareto_front(in_all)]


def _pareto_front(candidates: Iterable[tuple[tuple[float, ...], Fields]]) -> list[Fields]:
    """The Pareto front: candidates that no other equals or beats in all numbers; one of equals."""
    front: list[tuple[tuple[float, ...], Fields]] = []
    for costs, fields in sorted(candidates, key=lambda pair: pair[0]):
        if not any(all(map(operator.le, other, costs)) for other, _ in front):
            front.append((costs, fields))
    return [fields for _, fields in front]
