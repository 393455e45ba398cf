"""Plan of a disaggregated server and its performance: eq. (1) to (8) of MegaScale-Infer.

Attention is replicated on ``n_a`` nodes, each with the KV caches of its own sequences; a node of
experts holds one or more full experts. Symbols of the paper are in the docstrings.

References:
  Zhu et al., "MegaScale-Infer", 2025, section 4. https://arxiv.org/abs/2504.02263
"""

import functools
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.serving import times
from benchmarks.planner.serving.pingpong import makespan
from benchmarks.planner.serving.times import ITEMSIZE, Times, Utilisation, model_utilisation
from moe.planner.models import ModelSizes
from moe.planner.search import MEMORY_FRACTION
from sharding.costs.hardware import LINK_EFFICIENCY, Hardware

PREFILL = ("elsewhere", "group", "turns")
"""Devices of prefill: a cluster that the plan does not count, as in the paper; a separate group
that it counts; or the two groups, between token steps."""


@dataclass(frozen=True)
class Load:
    """Workload and latency limit of the server.

    Attributes:
      slo: most seconds between two tokens of a request.
      prompt: tokens of a prompt.
      completion: tokens of a completion.
      context: s, tokens that a cache holds on average; None is the prompt and half the completion.

    The defaults are the medians and the limit of the paper's evaluation.
    """

    slo: float = 0.15
    prompt: int = 571
    completion: int = 159
    context: int | float | None = None

    def __post_init__(self):
        for name in ("slo", "prompt", "completion"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        if self.context is not None and not self.context > 0:
            raise ValueError(f"context={self.context} must be above 0.")

    @property
    def cached(self) -> int | float:
        """s."""
        return self.prompt + self.completion / 2 if self.context is None else self.context


@dataclass(frozen=True)
class DevicePair:
    """Devices of attention and of experts, and the efficiency of their programs and adapters.

    Attributes:
      attention, experts: devices.
      prices: of a device of each side; 1 counts devices.
      efficiency: the fraction of peak that products reach.
      networks: utilisation of the adapters of the two sides; None follows from rate and latency.
      profiled: measured ``(T_a, T_e)`` of nodes of ``tp_a`` and ``tp_e`` devices, by those numbers;
        missing entries come from the roofline. ``T_e`` is of a node with one expert.
        `benchmarks.planner.serving.times.read_profile` reads them from a file.
    """

    attention: Hardware
    experts: Hardware
    prices: tuple[float, float] = (1.0, 1.0)
    efficiency: float = 0.6
    networks: tuple[Utilisation | None, Utilisation | None] = (None, None)
    profiled: tuple[dict[int, Times], dict[int, Times]] = ({}, {})


@dataclass(frozen=True)
class Shape:
    """The sizes of the two groups.

    Attributes:
      tp_attention: devices of an attention node.
      attention_nodes: ``n_a``.
      tp_experts: devices of an expert node.
      experts_of_node: number of experts on a node; 1 in the paper.
      micro_batches: m.
    """

    tp_attention: int
    attention_nodes: int
    tp_experts: int
    experts_of_node: int
    micro_batches: int


class Server:
    """Times, bytes and prices of one pair of groups; batches and ``n_a`` may be arrays.

    Args:
      tp_attention, tp_experts, experts_of_node: as in `Shape`.
    """

    def __init__(
        self,
        model: ModelSizes,
        load: Load,
        pair: DevicePair,
        tp_attention: int,
        tp_experts: int,
        experts_of_node: int,
    ):
        self.model, self.load, self.pair = model, load, pair
        self.tp_attention, self.tp_experts = tp_attention, tp_experts
        self.experts_of_node = experts_of_node
        self.expert_nodes = model.num_experts // experts_of_node
        measured_attention, measured_experts = pair.profiled
        self.attention = measured_attention.get(tp_attention) or times.attention(
            model, pair.attention, tp_attention, load.cached, pair.efficiency
        )
        one_expert = measured_experts.get(tp_experts) if experts_of_node == 1 else None
        self.experts = one_expert or times.experts(
            model, pair.experts, tp_experts, experts_of_node, pair.efficiency
        )
        both = zip(pair.networks, (pair.attention, pair.experts), strict=True)
        self.networks = tuple(measured or model_utilisation(device) for measured, device in both)

    def weights_fit(self) -> bool:
        """``tp_a C_a > P_a`` and ``tp_e C_e > P_e``, in bytes."""
        budget = MEMORY_FRACTION * self.pair.experts.memory
        return self.most_in_memory() >= 1 and self.expert_bytes() < budget

    def expert_bytes(self) -> float:
        """Bytes on an expert device: ``P_e / tp_e``."""
        parameters = self.model.expert_parameters * self.model.num_expert_layers
        return ITEMSIZE * parameters / self.expert_nodes / self.tp_experts

    def attention_bytes(self, sequences: int) -> float:
        """Bytes on an attention device: weights, and the KV cache of the sequences of its node,
        ``(4 m b_a s h L / g + 2 P_a) / tp_a``."""
        model = self.model
        rest = model.parameters - model.expert_parameters * model.num_expert_layers
        return ITEMSIZE * rest / self.tp_attention + self._sequence_bytes() * sequences

    def _sequence_bytes(self) -> float:
        """Bytes of the KV cache of a sequence on an attention device."""
        model = self.model
        return ITEMSIZE * self.load.cached * model.cached(self.tp_attention) * model.num_layers

    def most_in_memory(self) -> int:
        """Constraint (8): the most sequences that fit on an attention node.

        ``4 m b_a s h L / g + 2 P_a < tp_a C_a``; C is `MEMORY_FRACTION` of a device's memory.
        """
        budget = MEMORY_FRACTION * self.pair.attention.memory - self.attention_bytes(0)
        return max(0, int(np.ceil(budget / self._sequence_bytes())) - 1)

    def rows_of_node(self, batch, nodes):
        """Rows of an expert node with even routing: ``b_e = b_a n_a K / E`` times its experts."""
        return batch * nodes * self.model.experts_per_token / self.expert_nodes

    def layer_times(self, batch, nodes):
        """``(T_a, T_e, T_c)`` of a micro-batch of `batch` on each attention node.

        The last is (6): ``b_a h K / tp_a`` values leave an attention device, ``b_e h / tp_e`` reach
        an expert device, each at the utilisation of a message of that size.
        """
        sent, received = self.message_bytes(batch, nodes)
        sending = np.maximum(
            self.networks[0].seconds(sent, self.pair.attention.outside),
            self.networks[1].seconds(received, self.pair.experts.outside),
        )
        return self.attention(batch), self.experts(self.rows_of_node(batch, nodes)), sending

    def message_bytes(self, batch, nodes):
        """Bytes that an attention device sends, and that an expert device receives."""
        model = self.model
        sent = ITEMSIZE * batch * model.d_model * model.experts_per_token / self.tp_attention
        rows = self.rows_of_node(batch, nodes)
        return sent, ITEMSIZE * rows * model.d_model / self.tp_experts

    def balance(self) -> float:
        """The paper's ``n_a = k1 E / (k3 K)``, not rounded, for equal times of large batches."""
        share = self.model.experts_per_token / self.expert_nodes
        return self.attention.slope / (self.experts.slope * share)

    def devices(self, nodes):
        """Numbers of devices of attention and of experts."""
        return self.tp_attention * nodes, self.tp_experts * self.expert_nodes

    def cost(self, nodes):
        """Price of both groups."""
        attention_devices, expert_devices = self.devices(nodes)
        return attention_devices * self.pair.prices[0] + expert_devices * self.pair.prices[1]

    def prompts(self, sequences, batch, nodes):
        """Seconds of prefill per token step where both groups alternate prefill and decoding.

        ``B / completion`` prompts arrive per step; the time is that of the busier group or the
        network. Products are at their rate; causal attention scores of a prompt are counted.
        """
        tokens = sequences / self.load.completion * self.load.prompt
        pair, model = self.pair, self.model
        attention_flops = 2 * times.attention_matrices(model) + 2 * model.queries * self.load.prompt
        peak = self.tp_attention * pair.attention.peak * pair.efficiency
        attention_seconds = attention_flops / peak
        expert_seconds = 6 * model.d_model * model.d_expert
        expert_seconds /= self.tp_experts * pair.experts.peak * pair.efficiency
        sent = ITEMSIZE * model.d_model * model.experts_per_token
        paces = (
            attention_seconds / nodes,
            expert_seconds * model.experts_per_token / self.expert_nodes,
            sent / (self.tp_attention * nodes * pair.attention.outside * LINK_EFFICIENCY),
            sent / (self.tp_experts * self.expert_nodes * pair.experts.outside * LINK_EFFICIENCY),
        )
        return tokens * model.num_layers * functools.reduce(np.maximum, paces)

    def step(self, batch, nodes, micro_batches: int, prefill: str):
        """``(T_iter, T_total)`` of a token step, (4) and (5).

        They are the time between two tokens of a request and the time of the whole batch; if
        `prefill` is "turns", both include that of prefill. ``T_iter`` is the paper's upper end,
        ``L max(m X, S)``.
        """
        attention, experts, sending = self.layer_times(batch, nodes)
        layers = self.model.num_layers
        once = attention + experts + 2 * sending
        pace = np.maximum(np.maximum(attention, experts), sending)
        token_latency = layers * np.maximum(micro_batches * pace, once)
        total = makespan(attention, experts, sending, micro_batches, layers)
        if prefill == "turns":
            reading = self.prompts(batch * nodes * micro_batches, batch, nodes)
            token_latency, total = token_latency + reading, total + reading
        return token_latency, total

    def hides(self, batch, nodes, micro_batches: int):
        """Constraints (2) and (3), hidden communication: ``T_c < T_f`` and ``m T_f >= S``."""
        attention, experts, sending = self.layer_times(batch, nodes)
        busier = np.maximum(attention, experts)
        filled = micro_batches * busier >= attention + experts + 2 * sending
        return (sending < busier) & filled


def prefill_devices(model: ModelSizes, load: Load, hardware: Hardware, efficiency: float) -> float:
    """Devices of a separate prefill group per generated token per second.

    Their products run at `efficiency`. A group serves many instances, so that this is not rounded.
    """
    matrices = times.attention_matrices(model) * model.num_layers
    scores = 2 * model.queries * load.prompt * model.num_layers
    flops = 2 * (matrices + model.routed_parameters) + scores
    return flops * load.prompt / load.completion / (hardware.peak * efficiency)
