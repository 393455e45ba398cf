"""Time of attention and experts for a micro-batch in one layer, measured or from a roofline.

They are ``k1 b_a + k2`` and ``k3 b_e + k4``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharding.planner.hardware import LINK_EFFICIENCY, Hardware
from sharding.planner.models.sizes import ModelSizes

MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that reading weights and caches is assumed to reach."""
ITEMSIZE = 2
"""Bytes of a weight, an activation, a key or a value: bfloat16."""


@dataclass(frozen=True)
class Times:
    """``max(products b, weights) + tokens b + constant`` seconds for ``b`` tokens.

    Attributes:
      products: seconds of a token's products.
      weights: seconds of reading the matrices from memory, which overlap with products.
      tokens: seconds that a token adds in any case: its keys and values are read from memory, its
        sums are sent over the links.
      constant: latencies.
    """

    products: float
    weights: float
    tokens: float
    constant: float

    def __call__(self, batch):
        """Seconds; batches may be an array."""
        return np.maximum(self.products * batch, self.weights) + self.tokens * batch + self.constant

    @property
    def slope(self) -> float:
        """``k1`` or ``k3``: what a token adds to a large batch."""
        return self.products + self.tokens


def fit_line(batches: Sequence[int | float], seconds: Sequence[int | float]) -> Times:
    """The straight line through measurements by least squares: slope ``k1``, start ``k2``.

    Raises:
      ValueError: with less than two different batches, or where more tokens take less time.
    """
    if len(set(batches)) < 2 or len(batches) != len(seconds):
        raise ValueError(
            f"{len(batches)} batches and {len(seconds)} times cannot be fitted: measure at least "
            "two batch sizes, with one time for each."
        )
    slope, constant = np.polyfit(batches, seconds, 1)
    if slope <= 0:
        raise ValueError(
            f"the fitted time per token is {slope:.3g} s, not above 0: measure larger batches."
        )
    return Times(0.0, 0.0, float(slope), max(0.0, float(constant)))


def _all_reduce_times(
    model: ModelSizes, hardware: Hardware, tp: int, times: int
) -> tuple[float, float]:
    """Seconds per token, and constant seconds, of all-reduces of a layer's output over `tp`."""
    if tp == 1:
        return 0.0, 0.0
    sent = 2 * (tp - 1) / tp * model.d_model * ITEMSIZE
    latency = 2 * (tp - 1) * hardware.latency_inside
    return times * sent / (hardware.inside * LINK_EFFICIENCY), times * latency


def attention(
    model: ModelSizes, hardware: Hardware, tp: int, context: int | float, efficiency: float
) -> Times:
    """``T_a`` of a node of `tp` devices.

    It has projections, router and shared expert as products, the cached keys and values of
    `context` tokens from memory, and one sum over the node (two with a shared expert).
    """
    matrices = attention_matrices(model)
    cache = 2 * ITEMSIZE * model.keys * context / tp
    sums, latency = _all_reduce_times(model, hardware, tp, 2 if model.d_ff else 1)
    memory = hardware.memory_bandwidth * MEMORY_EFFICIENCY
    return Times(
        products=2 * matrices / (tp * hardware.peak * efficiency),
        weights=ITEMSIZE * matrices / (tp * memory),
        tokens=cache / memory + sums,
        constant=latency,
    )


def experts(
    model: ModelSizes, hardware: Hardware, tp: int, experts_of_node: int, efficiency: float
) -> Times:
    """``T_e`` of a node of `tp` devices that holds `experts_of_node`.

    Its batch counts a token once for each of these experts that it is sent to.
    """
    matrices = 3 * model.d_model * model.d_expert
    sums, latency = _all_reduce_times(model, hardware, tp, 1)
    memory = hardware.memory_bandwidth * MEMORY_EFFICIENCY
    return Times(
        products=2 * matrices / (tp * hardware.peak * efficiency),
        weights=ITEMSIZE * matrices * experts_of_node / (tp * memory),
        tokens=sums,
        constant=latency,
    )


def attention_matrices(model: ModelSizes) -> int:
    """Parameters of one layer on the attention devices: all but the routed experts."""
    shared, router = 3 * model.d_model * model.d_ff, model.d_model * model.num_experts
    return model.attention_parameters + shared + router


def check(model: ModelSizes) -> None:
    """Raises:
    ValueError: on a model whose layers do not all have routed experts.
    """
    if not model.num_experts:
        raise ValueError("a dense model has no experts to serve on separate devices.")
    if model.num_dense_layers:
        raise ValueError(
            f"num_dense_layers={model.num_dense_layers}: serving plans need routed experts in "
            "all layers, not dense layers."
        )
