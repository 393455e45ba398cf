"""Search over all legal layouts of a cluster: the best plan of each.

Contexts, dispatches and communication dtypes are pruned by Pareto dominance: a candidate that sends
longer than another is kept if it has less memory traffic, or if it keeps less in memory, so that it
fits or recomputes less. A candidate that another beats in all of these is dropped.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe.planner import communication
from moe.planner.cost import (
    Cost,
    System,
    cost,
    cost_at_least,
    times_through_memory,
    value_bytes,
)
from moe.planner.memory import (
    Memory,
    activation_bytes,
    memory,
    saved_score_bytes,
    working_score_bytes,
)
from moe.planner.method import Batch, Method, with_fields
from moe.planner.models import ModelSizes, parameters_on_device, sharded_parameters
from sharding.costs.hardware import Hardware
from sharding.folding import Layout
from sharding.folding.layout import divisors

Fields = dict[str, str | None]
"""Fields of a `Method`."""
Candidates = list[tuple[Fields, bool]]
"""Candidates, each with true if it may take the least time."""

MEMORY_FRACTION = 0.92
"""Share of a device's memory that plans may use: the rest is the compiler's and the libraries'."""


@dataclass(frozen=True)
class Plan:
    """A layout with its batch and method, and their time and memory."""

    layout: Layout
    batch: Batch
    method: Method
    cost: Cost
    memory: Memory


@dataclass(frozen=True)
class Choices:
    """Choices of the search besides the sizes of a layout.

    The last two allow it to turn on an overlap that `method` has off, if a run supports it:
    two-batch overlap needs more than one row and no capacity that drops tokens, overlapped gradient
    reduction no pipeline.
    """

    dispatch: Sequence[str] = ("all_gather", "all_to_all")
    context: Sequence[str] = ("gather", "ring", "ulysses")
    storage: Sequence[str] = ("float32",)
    remat: Sequence[str] = ("none", "selective", "full")
    micro_rows: Sequence[int] = (1, 2, 4)
    activation_wire: Sequence[str | None] = (None,)
    gradient_wire: Sequence[str] = ("float32",)
    expert_chunks: Sequence[int] = (1,)
    two_batch_overlap: bool = False
    overlap_grad_reduce: bool = False


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


def candidate_contexts(case: Case, batch: Batch, system: System, choices: Choices) -> Candidates:
    model, layout = case.model, case.layout
    if layout.cp == 1:
        return [({}, True)]
    # Ulysses spreads the query heads of a tp rank over cp.
    shards_heads = model.num_heads // layout.tp % layout.cp == 0
    reduced = communication.reduced_layouts(layout)[0]
    costs = []
    for name in choices.context:
        if shards_heads or name != "ulysses":
            fields: Fields = {"context": name}
            costs.append((_context_costs(case.with_layout(reduced, fields), batch), fields))
    return _prune(costs, case.remats, system)


def candidate_dispatches(case: Case, batch: Batch, system: System, choices: Choices) -> Candidates:
    layout = case.layout
    if layout.ep * layout.etp == 1:
        return [({}, True)]
    reduced = communication.reduced_layouts(layout)[1]
    streams = tuple(rows.local_tokens(layout) for rows in case.method.streams(batch))
    costs = []
    for dispatch, comm_dtype in itertools.product(choices.dispatch, choices.activation_wire):
        fields: Fields = {"dispatch": dispatch, "activation_wire": comm_dtype}
        costs.append((_dispatch_costs(case.with_layout(reduced, fields), streams), fields))
    return _prune(costs, case.remats, system)


@functools.lru_cache(maxsize=4096)
def _context_costs(case: Case, batch: Batch) -> Costs:
    """Costs of a context, by attention's axes only: further axes add the same to all candidates."""
    model, layout, method = case.model, case.layout, case.method
    sent = [
        communication.non_expert_times(model, layout, rows, method, case.hardware)
        for rows in method.streams(batch)
    ]
    scores = (
        saved_score_bytes(model, layout, batch, method, "none"),
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
    sent: Iterable[tuple[communication.Timed, ...]],
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
    exposed = {1.0, 0.0 if hides_most else 1.0 - system.hidden}

    def seconds(costs: Costs) -> tuple[float, ...]:
        return tuple(
            n * costs.passes + share * costs.sent for n in num_accesses for share in exposed
        )

    in_time = [(seconds(costs), fields) for costs, fields in candidates]
    in_all = [((*seconds(costs), *costs.memory), fields) for costs, fields in candidates]
    quick = _pareto_front(in_time)
    return [(fields, fields in quick) for fields in _pareto_front(in_all)]


def _pareto_front(candidates: Iterable[tuple[tuple[float, ...], Fields]]) -> list[Fields]:
    """The Pareto front: candidates that no other equals or beats in all numbers; one of equals."""
    front: list[tuple[tuple[float, ...], Fields]] = []
    for costs, fields in sorted(candidates, key=lambda pair: pair[0]):
        if not any(all(map(operator.le, other, costs)) for other, _ in front):
            front.append((costs, fields))
    return [fields for _, fields in front]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
      plans: the best plan of each layout that fits, the fastest first.
      too_large: layouts that do not fit, and the bytes that each needs at least.
      illegal: number of layouts that a rule excludes, by the rule.
    """

    plans: list[Plan]
    too_large: dict[Layout, float]
    illegal: Counter[str]


def broken_rule(model: ModelSizes, layout: Layout, rows: int, time: int) -> str | None:
    """The rule that a layout breaks; None for a legal layout."""
    # (size, its divisor, rule)
    rules = (
        (model.num_kv_heads, layout.tp, "tp must divide the key/value heads"),
        (model.num_heads, layout.tp, "tp must divide the heads"),
        (model.d_ff, layout.tp, "tp must divide the hidden units of dense layers"),
        (model.dense_d_ff, layout.tp, "tp must divide the hidden units of dense layers"),
        (time, (1 if layout.cp == 1 else 2) * layout.cp, "2 cp must divide the sequence"),
        (rows, layout.dp, "dp must divide the sequences"),
        (model.num_experts, layout.ep, "ep must divide the experts"),
        (model.d_expert, layout.etp, "etp must divide the hidden units of an expert"),
    )
    if not model.num_experts and layout.ep * layout.etp > 1:
        return "ep and etp need experts"
    if layout.pp * layout.vpp > model.num_main_layers:
        return "pp x vpp must not exceed the layers"
    return next((rule for size, divisor, rule in rules if size % divisor), None)


def chunks_of_a_stage(model: ModelSizes, layout: Layout) -> list[int]:
    """Possible chunks per stage (vpp) of a legal layout, with stages as deep as with one chunk."""
    if layout.pp == 1:
        return [1]
    main = model.num_main_layers
    return [vpp for vpp in divisors(-(-main // layout.pp)) if layout.pp * vpp <= main]


def layouts(
    devices: int, most_tp: int | None = None, *, has_experts: bool = True
) -> Iterator[Layout]:
    """Every layout of that number of devices, with one chunk on each pipeline stage.

    Args:
      most_tp: largest ``tp`` and ``etp``; None is any.
      has_experts: False leaves out ``ep`` and ``etp`` (`Layout.check_experts`).
    """
    most = devices if most_tp is None else most_tp
    for pp in divisors(devices):
        stage = devices // pp
        for tp in (n for n in divisors(stage) if n <= most):
            for cp in divisors(stage // tp):
                for ep in divisors(stage) if has_experts else (1,):
                    etps = divisors(stage // ep) if has_experts else [1]
                    for etp in (n for n in etps if n <= most):
                        yield Layout(tp, cp, stage // (tp * cp), pp, ep, etp)


def search(
    model: ModelSizes,
    devices: int,
    rows: int,
    time: int,
    hardware: Hardware,
    method: Method | None = None,
    system: System | None = None,
    choices: Choices | None = None,
) -> SearchResult:
    """Finds the best plan of every legal layout.

    Layouts whose ``tp`` or ``etp`` exceeds `hardware.domain` are not searched.

    Args:
      devices: number of devices.
      rows: sequences of an optimizer step.
      time: tokens of each.
      method: fields that `choices` do not vary.
    """
    method, system = method or Method(), system or System()
    choices = choices or Choices()
    plans, too_large, broken_rules = [], {}, Counter()
    for layout in layouts(devices, hardware.domain, has_experts=model.num_experts > 0):
        rule = broken_rule(model, layout, rows, time)
        if rule is not None:
            broken_rules[rule] += 1
            continue
        best = best_plan(model, layout, rows, time, hardware, method, system, choices)
        if isinstance(best, Plan):
            plans.append(best)
        else:
            too_large[layout] = best
    plans.sort(key=lambda plan: plan.cost.total)
    return SearchResult(plans, too_large, broken_rules)


def best_plan(
    model: ModelSizes,
    layout: Layout,
    rows: int,
    time: int,
    hardware: Hardware,
    method: Method,
    system: System,
    choices: Choices,
) -> Plan | float:
    """Fastest plan of a layout that fits in device memory.

    Args:
      layout: a legal one (`broken_rule`); its ``vpp`` is replaced by each of `chunks_of_a_stage`.
      rows: sequences of an optimizer step.
      time: tokens of each.
      method: fields that `choices` do not have. The others are replaced, except that an overlap
        which is on stays on.
      choices: with `remat` in order, the fastest first.

    Returns:
      The plan. If none fits, the bytes that a device needs at least; infinity if no `micro_rows`
      divides the rows of a ``dp`` rank.
    """
    budget = MEMORY_FRACTION * hardware.memory
    least = min_state_bytes(model, layout, method, choices)
    if least > budget:
        return least
    needs, best = math.inf, None

    def try_remats(chunked: Layout, batch: Batch, variant: Method) -> bool:
        """Tries all rematerialisations of a method; true if more memory would not improve the best.

        That is the case if the fastest rematerialisation fits, or if even it is slower than the
        best plan so far.
        """
        nonlocal needs, best
        for remat in choices.remat:
            if variant.execution.fsdp and remat == "none":
                continue  # `Execution` refuses it.
            candidate = with_fields(variant, remat=remat)
            # Rematerialisations that keep less take longer.
            is_first = remat == choices.remat[0]
            if best is not None:
                bound = cost_at_least(model, chunked, batch, candidate, hardware, system)
                if bound >= best.cost.total:
                    return is_first
            required = memory(model, chunked, batch, candidate)
            needs = min(needs, required.total)
            if required.total <= budget:
                predicted = cost(model, chunked, batch, candidate, hardware, system)
                if best is None or predicted.total < best.cost.total:
                    best = Plan(chunked, batch, candidate, predicted, required)
                return is_first
        return False

    case = Case(model, layout, method, hardware, tuple(choices.remat))
    # The smallest pipeline bubble first, so that the others are pruned early.
    chunks = reversed(chunks_of_a_stage(model, layout))
    sizes = [replace(layout, vpp=vpp) for vpp in chunks]
    for micro_rows in (n for n in choices.micro_rows if rows % (layout.dp * n) == 0):
        batch = Batch(rows, time, micro_rows)
        quick, small = communication_variants(case, batch, system, choices)
        for variant in method_variants(model, layout, batch, method, choices):
            for chunked in sizes:
                fitted = [
                    try_remats(chunked, batch, with_fields(variant, **fields)) for fields in quick
                ]
                for fields in () if all(fitted) else small:
                    try_remats(chunked, batch, with_fields(variant, **fields))
    return needs if best is None else best


def communication_variants(
    case: Case, batch: Batch, system: System, choices: Choices
) -> tuple[list[Fields], list[Fields]]:
    """Candidate combinations of context, dispatch and communication dtype.

    The first list may take the least time; the second can only be better by keeping less. The costs
    of context and of dispatch with its dtype are independent of each other.
    """
    quick: list[Fields] = []
    small: list[Fields] = []
    contexts = candidate_contexts(case, batch, system, choices)
    dispatches = candidate_dispatches(case, batch, system, choices)
    for (context, first), (dispatch, second) in itertools.product(contexts, dispatches):
        variants = quick if first and second else small
        variants.append(context | dispatch)
    return quick, small


def method_variants(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, choices: Choices
) -> Iterator[Method]:
    """The method with each allowed storage, communication dtype of gradients, and overlap."""
    # Chunks of tokens are of no use without expert parallelism.
    chunks = choices.expert_chunks if layout.ep * layout.etp > 1 else (1,)
    may_halve = batch.micro_rows > 1 and model.capacity_factor is None
    may_reduce = layout.pp == 1 and layout.num_devices > 1
    execution = method.execution
    fields = {
        "storage": choices.storage,
        "gradient_wire": choices.gradient_wire,
        "expert_chunks": chunks,
        "two_batch_overlap": switch_values(
            execution.two_batch_overlap, choices.two_batch_overlap and may_halve
        ),
        "overlap_grad_reduce": switch_values(
            execution.overlap_grad_reduce, choices.overlap_grad_reduce and may_reduce
        ),
    }
    for values in itertools.product(*fields.values()):
        yield with_fields(method, **dict(zip(fields, values, strict=True)))


def switch_values(value: bool, may_be_on: bool) -> tuple[bool, ...]:
    """Values of a switch: as it is, and on if it may be."""
    return (value,) if value or not may_be_on else (False, True)


def min_state_bytes(model: ModelSizes, layout: Layout, method: Method, choices: Choices) -> float:
    """Lower bound of the bytes of weights, gradients and optimizer over all choices."""
    sharded, full = sharded_parameters(model, layout), parameters_on_device(model, layout)
    used = sharded if method.fsdp else full
    storages = [with_fields(method, storage=storage).stored for storage in choices.storage]
    return float(
        min(
            used * (stored.weight + stored.gradient) + sharded * (stored.master + stored.moments)
            for stored in storages
        )
    )
