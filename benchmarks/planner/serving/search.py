"""Search for the best plan of a disaggregated server: Algorithm 1 of MegaScale-Infer.

The paper takes ``n_a`` from its balance of ``k1`` and ``k3``; here every ``n_a`` is tried, which
agrees with it for large batches and is better where memory or the latency limit keeps the experts'
batches small. For a pair of groups throughput grows with the batch, so the largest batch that (7)
and (8) allow is found by bisection, and then the largest below it that (2) and (3) allow too.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.serving.plan import DevicePair, Load, Server, Shape, prefill_devices
from benchmarks.planner.serving.times import check
from moe.planner.models import ModelSizes
from sharding.folding.layout import divisors

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Space:
    """Search space.

    Attributes:
      tp_attention, tp_experts: devices of a node; those that do not divide the heads, the hidden
        units or fit a server are skipped.
      experts_of_node: numbers of experts on a node; None is every one that divides the experts.
      micro_batches: m.
      most_nodes: the largest ``n_a``.
      most_devices: of both groups in total; None is any.
      prefill: allowed devices of prefill, of `PREFILL`.
    """

    tp_attention: Sequence[int] = TP_SIZES
    tp_experts: Sequence[int] = TP_SIZES
    experts_of_node: Sequence[int] | None = None
    micro_batches: Sequence[int] = (3, 4)
    most_nodes: int = 64
    most_devices: int | None = None
    prefill: Sequence[str] = ("elsewhere",)


@dataclass(frozen=True)
class ServingPlan:
    """A plan and its performance.

    Attributes:
      server: the two kinds of nodes.
      batch: ``b_a``, tokens of a micro-batch on an attention node.
      sequences: B, on all nodes in all micro-batches.
      layer: ``(T_a, T_e, T_c)``, seconds.
      token_latency: ``T_iter``, seconds between two tokens of a request.
      total: ``T_total``, seconds of a token step of the whole batch.
      devices: of attention, of experts, and of prompts where these have a group.
      cost: price of all of them.
      limit: the constraint that a larger batch would break.
    """

    server: Server
    shape: Shape
    prefill: str
    batch: int
    sequences: int
    layer: tuple[float, float, float]
    token_latency: float
    total: float
    devices: tuple[float, float, float]
    cost: float
    limit: str

    @property
    def pair(self) -> DevicePair:
        return self.server.pair

    @property
    def balance(self) -> float:
        """``n_a`` by the paper's formula."""
        return self.server.balance()

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.sequences / self.total

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.throughput / sum(self.devices)

    @property
    def per_cost(self) -> float:
        """Tokens per second for the price of an L20, or of a device where prices are 1."""
        return self.throughput / self.cost


def servers(model: ModelSizes, load: Load, pair: DevicePair, space: Space) -> Iterator[Server]:
    """Pairs of nodes whose weights fit."""
    check(model)
    sizes = space.experts_of_node
    sizes = divisors(model.num_experts) if sizes is None else sizes
    for tp_attention, tp_experts in itertools.product(space.tp_attention, space.tp_experts):
        if model.num_kv_heads % tp_attention or tp_attention > pair.attention.domain:
            continue
        if model.d_expert % tp_experts or tp_experts > pair.experts.domain:
            continue
        for experts_of_node in sizes:
            if model.num_experts % experts_of_node:
                raise ValueError(
                    f"experts_of_node={experts_of_node} does not divide the "
                    f"{model.num_experts} experts."
                )
            server = Server(model, load, pair, tp_attention, tp_experts, experts_of_node)
            if server.weights_fit():
                yield server


def largest_batch(server: Server, nodes, micro_batches: int, prefill: str):
    """Largest ``b_a`` for each ``n_a`` under (7) and (8), by bisection; 0 where there is none."""
    most = server.most_in_memory() // micro_batches
    low, high = np.zeros(nodes.shape, int), np.full(nodes.shape, most)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        token_latency, _ = server.step(middle, nodes, micro_batches, prefill)
        keeps = token_latency <= server.load.slo
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle - 1)
    return low


def throughput_per_cost(server: Server, batch, nodes, micro_batches: int, prefill: str):
    """Score of a plan: tokens per second over the price of all devices that are counted."""
    _, total = server.step(batch, nodes, micro_batches, prefill)
    throughput = batch * nodes * micro_batches / total
    return throughput / (server.cost(nodes) + throughput * _prompt_devices(server, prefill)[1])


def _prompt_devices(server: Server, prefill: str) -> tuple[float, float]:
    """Devices for prompts and their price, for each token per second: the cheaper of the two."""
    if prefill != "group":
        return 0.0, 0.0
    pair = server.pair
    options = []
    for hardware, price in zip((pair.attention, pair.experts), pair.prices, strict=True):
        num_devices = prefill_devices(server.model, server.load, hardware, pair.efficiency)
        options.append((num_devices, num_devices * price))
    return min(options, key=lambda devices_and_price: devices_and_price[1])


def best_serving_plan(
    model: ModelSizes, load: Load, pair: DevicePair, space: Space | None = None
) -> ServingPlan | None:
    """The plan with most tokens per second for its price; None where none is feasible."""
    return max(plans(model, load, pair, space), key=lambda plan: plan.per_cost, default=None)


def plans(
    model: ModelSizes, load: Load, pair: DevicePair, space: Space | None = None
) -> Iterator[ServingPlan]:
    """The best ``n_a`` and batch for each kind of nodes, m and `prefill`."""
    space = space or Space()
    nodes = np.arange(1, space.most_nodes + 1)
    for server in servers(model, load, pair, space):
        allowed = nodes
        if space.most_devices is not None:
            allowed = nodes[sum(server.devices(nodes)) <= space.most_devices]
        for micro_batches in space.micro_batches:
            for prefill in space.prefill:
                best = _best_nodes(server, allowed, micro_batches, prefill)
                if best is not None:
                    yield describe(server, best[0], micro_batches, best[1], prefill)


def _best_nodes(server: Server, nodes, micro_batches: int, prefill: str) -> tuple[int, int] | None:
    """Best ``n_a`` and ``b_a``; None where no batch is feasible."""
    batch = largest_batch(server, nodes, micro_batches, prefill)
    nodes, batch = nodes[batch > 0], batch[batch > 0]
    values = throughput_per_cost(server, batch, nodes, micro_batches, prefill)
    best_sizes, highest = None, 0.0
    # From the highest score on: where communication is exposed, a smaller batch is needed.
    for index in np.argsort(-values, kind="stable"):
        if values[index] <= highest:
            break
        node, upper = int(nodes[index]), int(batch[index])
        batches = np.array([upper])
        if not server.hides(batches, node, micro_batches)[0]:
            batches = np.arange(1, upper)
            batches = batches[server.hides(batches, node, micro_batches)]
        if batches.size:
            feasible_batch = int(batches[-1])
            value = float(throughput_per_cost(server, feasible_batch, node, micro_batches, prefill))
            if value > highest:
                best_sizes, highest = (node, feasible_batch), value
    return best_sizes


def describe(
    server: Server, nodes: int, micro_batches: int, batch: int, prefill: str
) -> ServingPlan:
    """All numbers of a plan."""
    m = micro_batches
    token_latency, total = (float(time) for time in server.step(batch, nodes, m, prefill))
    sequences = batch * nodes * m
    attention, experts, sending = server.layer_times(batch, nodes)
    prompt_devices, price = _prompt_devices(server, prefill)
    attention_devices, expert_devices = server.devices(nodes)
    throughput = sequences / total
    return ServingPlan(
        server,
        Shape(server.tp_attention, nodes, server.tp_experts, server.experts_of_node, m),
        prefill,
        batch,
        sequences,
        (float(attention), float(experts), float(sending)),
        token_latency,
        total,
        (float(attention_devices), float(expert_devices), throughput * prompt_devices),
        float(server.cost(nodes) + throughput * price),
        _binding_limit(server, nodes, m, batch, prefill),
    )


def _binding_limit(server: Server, nodes: int, micro_batches: int, batch: int, prefill: str) -> str:
    if (batch + 1) * micro_batches > server.most_in_memory():
        return "memory"
    if server.step(batch + 1, nodes, micro_batches, prefill)[0] > server.load.slo:
        return "time between tokens"
    return "communication"


def search(
    model: ModelSizes, load: Load, pairs: Sequence[DevicePair], space: Space | None = None
) -> list[ServingPlan]:
    """The best plan of every pair of devices, the best of them first.

    Raises:
      ValueError: where no plan of any pair keeps every constraint.
    """
    plans_of_pairs = [
        plan for pair in pairs if (plan := best_serving_plan(model, load, pair, space)) is not None
    ]
    if not plans_of_pairs:
        names = ", ".join(f"{pair.attention.name}:{pair.experts.name}" for pair in pairs)
        raise ValueError(
            f"no plan on {names} keeps {load.slo * 1000:g} ms between tokens, fits in memory and "
            "overlaps its communication: allow more time, more micro-batches or other devices."
        )
    return sorted(plans_of_pairs, key=lambda plan: -plan.per_cost)
