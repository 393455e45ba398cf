"""Devices and the links between them: datasheet rates, and the share that programs reach."""

import re
from dataclasses import dataclass

from sharding.former_names import former_names

LINK_EFFICIENCY = 0.8
"""Share of a link's rate that large messages reach. DeepEP reports 153 to 158 of 200 GB/s between
H800s inside a server and 43 to 58 of 50 GB/s outside, where some tokens are sent once for a whole
server."""


@dataclass(frozen=True)
class Hardware:
    """One device and its links, SI units; rates are of one direction.

    Attributes:
      name: its name in `parse`.
      peak: FLOP/s of dense products of bfloat16.
      memory: bytes; sellers' "80 GB" are GiB.
      memory_bandwidth: bytes/s.
      domain: devices that the fast links join (a server, a rack, a pod).
      inside: bytes/s that a device sends inside its domain.
      outside: bytes/s that a device sends to others.
      latency_inside, latency_outside: seconds of one step of a collective, typical ones.
      price: of a device over that of an L20, None where no source gives one.
      exchange: the rate of an all-to-all of tokens as a fraction of that of a ring over the same
        devices, from the crossover of dispatchers in `benchmarks/dispatch.py` or elsewhere; 1 if
        not measured.
      overlaps: it computes while it communicates.
    """

    name: str
    peak: float
    memory: float
    memory_bandwidth: float
    domain: int
    inside: float
    outside: float
    latency_inside: float = 4e-6
    latency_outside: float = 12e-6
    price: float | None = None
    exchange: float = 1.0
    overlaps: bool = True


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        # DGX H100: NVLink 4, a 400 Gb/s adapter for each device.
        Hardware("h100", 989.5e12, 85.5e9, 3.35e12, 8, 450e9, 50e9),
        # Eight of them gather tokens sooner than they exchange them from top-6 on, not from top-8.
        Hardware("h800", 989e12, 85.5e9, 3.4e12, 8, 200e9, 50e9, exchange=6 / 8, price=5.28),
        # DGX A100: NVLink 3, 200 Gb/s adapters.
        Hardware("a100", 312e12, 85.5e9, 2.0e12, 8, 300e9, 25e9),
        Hardware("a800", 312e12, 85.5e9, 2.039e12, 8, 200e9, 25e9, price=2.26),
        Hardware("h20", 148e12, 102e9, 4.0e12, 8, 450e9, 50e9, price=1.85),
        # PCIe 4 x16, and an adapter of 200 Gb/s for two devices.
        Hardware("l40s", 362e12, 48e9, 0.864e12, 8, 32e9, 12.5e9, price=1.08),
        Hardware("l20", 119.5e12, 48e9, 0.864e12, 8, 32e9, 12.5e9, price=1.0),
        Hardware("b200", 2250e12, 192e9, 7.7e12, 8, 900e9, 50e9),
        # A torus: a collective over one of its axes uses two of a chip's six links.
        Hardware("v5p", 459e12, 102e9, 2.765e12, 8960, 180e9, 6.25e9, 1e-6, 30e-6),
        # A few cores; the devices are threads that share one memory. Eight of them on two cores
        # gather sooner where an exchange sends more than 43 (bfloat16) to 47 % (float32) as much.
        Hardware(
            *("laptop", 0.2e12, 16e9, 50e9, 1024, 10e9, 10e9, 20e-6, 20e-6),
            exchange=0.45,
            overlaps=False,
        ),
    )
}
"""Jin et al., "MegaScale-MoE", 2025 (H800, A100, H20); Zhu et al., "MegaScale-Infer", 2025 (L40S,
A800, L20, and all prices: https://arxiv.org/abs/2504.02263); vendors' datasheets."""


UNKNOWN = Hardware("unknown links", 1.0, 1.0, 1.0, 2**31, 1.0, 1.0, 0.0, 0.0)
"""Stands for devices that are not in the table: times are proportional to the bytes sent."""


def parse(text: str) -> tuple[Hardware, int]:
    """The device and how many of it: ``"h100x64"``.

    Raises:
      ValueError: on another spelling or an unknown device.
    """
    match = re.fullmatch(r"([a-z0-9]+?)x([1-9]\d*)", text)
    if match is None or match[1] not in HARDWARE:
        raise ValueError(
            f"hardware {text!r} is not a device type and a number: write for example h100x64, with "
            f"one of {', '.join(HARDWARE)}."
        )
    return HARDWARE[match[1]], int(match[2])


def find_hardware(kind: str) -> Hardware | None:
    """The accelerator that JAX calls `kind`; None for a CPU and for an unknown device.

    Examples:
      >>> find_hardware("NVIDIA H100 80GB HBM3").name
      'h100'
    """
    words = kind.lower().replace("-", " ").split()
    return next((HARDWARE[word] for word in words if word in HARDWARE and word != "laptop"), None)


__getattr__ = former_names(__name__, of_kind=find_hardware)
