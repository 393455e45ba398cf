"""Utilisation of a network adapter by message size: ``Util`` of the plan's constraint (6)."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from sharding.planner.hardware import LINK_EFFICIENCY, Hardware


@dataclass(frozen=True)
class Utilisation:
    """Points of a measured curve.

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
        times = [
            size / fraction_of_rate
            for size, fraction_of_rate in zip(self.sizes, self.fractions, strict=True)
        ]
        for n, (before, after) in enumerate(pairwise(times)):
            if after < before:
                raise ValueError(
                    f"{self.sizes[n + 1]:g} bytes at {self.fractions[n + 1]:g} of the rate would "
                    f"arrive before {self.sizes[n]:g} bytes at {self.fractions[n]:g}: check them."
                )

    def seconds(self, size, rate: float):
        """Seconds of messages of `size` bytes over an adapter of `rate` bytes/s.

        Sizes may be an array.
        """
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


def read(path: Path) -> Utilisation:
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
    return Utilisation(
        tuple(size for size, _ in points), tuple(fraction_of_rate for _, fraction_of_rate in points)
    )
