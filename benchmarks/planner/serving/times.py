"""Times of a micro-batch in one layer, modelled or measured: attention, experts and messages.

Attention and experts take ``k1 b_a + k2`` and ``k3 b_e + k4``, by a roofline or a measured profile;
a message takes its bytes over the rate of an adapter, of which it reaches a utilisation.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe.planner.models import ModelSizes
from sharding.costs.hardware import HARDWARE, LINK_EFFICIENCY, Hardware

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


def _roofline(
    model: ModelSizes,
    hardware: Hardware,
    tp: int,
    efficiency: float,
    matrices: int,
    num_reads: int = 1,
    cache: float = 0.0,
    num_sums: int = 1,
) -> Times:
    """Times of a node of `tp` devices: a token is multiplied by `matrices`, of which the node reads
    a number of copies; it reads bytes of a cache, and all-reduces of its outputs follow."""
    memory = hardware.memory_bandwidth * MEMORY_EFFICIENCY
    sent = 2 * (tp - 1) / tp * model.d_model * ITEMSIZE
    latency = 2 * (tp - 1) * hardware.latency_inside
    return Times(
        products=2 * matrices / (tp * hardware.peak * efficiency),
        weights=ITEMSIZE * matrices * num_reads / (tp * memory),
        tokens=cache / memory + num_sums * sent / (hardware.inside * LINK_EFFICIENCY),
        constant=num_sums * latency,
    )


def attention(
    model: ModelSizes, hardware: Hardware, tp: int, context: int | float, efficiency: float
) -> Times:
    """``T_a`` of a node of `tp` devices.

    It has projections, router and shared expert as products, the cached keys and values of
    `context` tokens from memory, and one sum over the node (two with a shared expert).
    """
    cache = 2 * ITEMSIZE * model.keys * context / tp
    matrices, num_sums = attention_matrices(model), 2 if model.d_ff else 1
    return _roofline(model, hardware, tp, efficiency, matrices, cache=cache, num_sums=num_sums)


def experts(
    model: ModelSizes, hardware: Hardware, tp: int, experts_of_node: int, efficiency: float
) -> Times:
    """``T_e`` of a node of `tp` devices that holds `experts_of_node`.

    Its batch counts a token once for each of these experts that it is sent to.
    """
    matrices = 3 * model.d_model * model.d_expert
    return _roofline(model, hardware, tp, efficiency, matrices, experts_of_node)


def attention_matrices(model: ModelSizes) -> int:
    """Parameters of one layer on the attention devices: all but the routed experts."""
    shared, router = 3 * model.d_model * model.d_ff, model.d_model * model.num_experts
    return model.attention_parameters + shared + router


def check(model: ModelSizes) -> None:
    """Raises:
    ValueError: on a model whose layers do not all have grouped-query attention and routed experts.
    """
    if not model.num_experts:
        raise ValueError("a dense model has no experts to serve on separate devices.")
    if model.latent is not None:
        raise ValueError(
            "serving plans do not support latent attention: its decode step reads latent vectors, "
            "which they do not count."
        )
    if model.num_dense_layers:
        raise ValueError(
            f"num_dense_layers={model.num_dense_layers}: serving plans need routed experts in "
            "all layers, not dense layers."
        )


@dataclass(frozen=True)
class Utilisation:
    """Utilisation of an adapter by message size, ``Util`` of the plan's constraint (6), by points.

    Between two points the time of a message goes from one to the other as a power of its size;
    below the first it stays (a latency), above the last the utilisation does (a rate).

    Args:
      sizes: bytes, rising.
      fractions: of the adapter's rate, in (0, 1].

    Raises:
      ValueError: where that is no curve, or a larger message would arrive sooner.
    """

    sizes: tuple[float, ...]
    fractions: tuple[float, ...]

    def __post_init__(self):
        if len(self.sizes) != len(self.fractions) or not self.sizes:
            raise ValueError(
                f"{len(self.sizes)} sizes and {len(self.fractions)} fractions must be equally "
                "many, and at least one."
            )
        if not all(size > 0 for size in self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes={self.sizes} must be above 0 and ascending.")
        if not all(0 < fraction <= 1 for fraction in self.fractions):
            raise ValueError(
                f"fractions={self.fractions} must be in (0, 1]: they are fractions of the rate."
            )
        times = [size / fraction for size, fraction in zip(self.sizes, self.fractions, strict=True)]
        for n, (before, after) in enumerate(pairwise(times)):
            if after < before:
                raise ValueError(
                    f"{self.sizes[n + 1]:g} bytes at {self.fractions[n + 1]:g} of the rate would "
                    f"arrive before {self.sizes[n]:g} bytes at {self.fractions[n]:g}: check them."
                )

    def seconds(self, size, rate: float):
        """Seconds of a message of `size` bytes (or an array) over an adapter of `rate` bytes/s."""
        times = np.array(self.sizes) / (np.array(self.fractions) * rate)
        size = np.maximum(size, self.sizes[0])
        inside = np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(times)))
        return inside * np.maximum(1.0, size / self.sizes[-1])


def model_utilisation(hardware: Hardware) -> Utilisation:
    """Modelled utilisation from the latency ``t`` and the rate ``W`` of a device's adapter.

    ``Util(size) = e size / (size + e W t)``, e being `LINK_EFFICIENCY`. MegaScale-Infer publishes
    its measured curve as a picture only.
    """
    sizes = tuple(2.0**power for power in range(8, 31))
    reached = hardware.outside * LINK_EFFICIENCY
    half = reached * hardware.latency_outside
    return Utilisation(sizes, tuple(LINK_EFFICIENCY * size / (size + half) for size in sizes))


def read_network(path: Path) -> Utilisation:
    """Reads lines of ``bytes,fraction``; empty ones and those that start with ``#`` are skipped.

    Raises:
      ValueError: on another line.
    """
    points = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            size, fraction = (float(word) for word in line.split(","))
        except ValueError:
            raise ValueError(
                f"{path}:{line_number}: {line!r} is not a size and a fraction: write for example "
                "262144,0.6."
            ) from None
        if not (math.isfinite(size) and math.isfinite(fraction)):
            raise ValueError(f"{path}:{line_number}: {line!r} must be two finite numbers.")
        points.append((size, fraction))
    return Utilisation(tuple(size for size, _ in points), tuple(fraction for _, fraction in points))


DEVICE_GROUPS = ("attention", "experts")


class Profile(NamedTuple):
    """Measured times of one type of device, by the number of devices of a node.

    Attributes:
      attention: ``T_a`` of a micro-batch's tokens on a node.
      experts: ``T_e`` of the tokens that a node with one expert receives.
    """

    attention: dict[int, Times]
    experts: dict[int, Times]


EMPTY_PROFILE = Profile({}, {})


def read_profile(path: Path) -> dict[str, Profile]:
    """Reads measured times by device from a JSON file.

    Its form is ``{device: {side: {devices of a node: [[batch, seconds], ...]}}}``. Each list
    becomes the line that `fit_line` fits to it.

    Raises:
      ValueError: on a file of another form, or times that give no line.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    profiles = dict[str, Profile]()
    for device, device_groups in _checked_items(contents, f"{path}", [*HARDWARE]):
        nodes = profiles[device] = Profile({}, {})
        for side, sizes in _checked_items(device_groups, f"{path}: {device}", [*DEVICE_GROUPS]):
            for size, points in _checked_items(sizes, f"{path}: {device}: {side}", None):
                where = f"{path}: {device}: {side}: {size}"
                if not (size.isascii() and size.isdecimal() and int(size) > 0):
                    raise ValueError(
                        f"{where} is not a number of devices per node: write 1 or more."
                    )
                getattr(nodes, side)[int(size)] = _fit_points(points, where)
    return profiles


def _checked_items(mapping: Any, where: str, names: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Entries of a JSON object, whose names must be of `names`; None allows any."""
    if not isinstance(mapping, dict):
        raise ValueError(f"{where}: {json.dumps(mapping)} must be a JSON object.")
    for name, value in mapping.items():
        if names is not None and name not in names:
            raise ValueError(f"{where}: {name!r} is not known: choose among {', '.join(names)}.")
        yield name, value


def _fit_points(points: Any, where: str) -> Times:
    pairs = points if isinstance(points, list) else [points]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_above_zero, pair))):
            raise ValueError(
                f"{where}: {json.dumps(pair)} is not a batch size and its seconds, both above 0: "
                "write for example [256, 3.1e-4]."
            )
    try:
        return fit_line([batch for batch, _ in pairs], [seconds for _, seconds in pairs])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_above_zero(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
