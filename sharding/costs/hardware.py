"""Devices and the links between them: datasheet rates, and the share that programs reach."""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

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
      price: price of a device over the price of an L20, None if no source gives one.
      exchange: the rate of an all-to-all of tokens as a fraction of the rate of a ring over the
        same devices, from the crossover of dispatchers in `benchmarks/dispatch.py` or elsewhere; 1
        if not measured.
      overlaps: it computes while it communicates.
      power: watts at which it reaches `peak`; None if no source gives them.
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
    power: float | None = None

    def limited(self, watts: float) -> "Hardware":
        """The device under a power limit: products slow down by the cube root of the power.

        Power rises with the clock times the squared voltage, which rises with the clock: an H100
        NVL of 400 W has 835 TFLOP/s by its datasheet, 0.84 of an H100 SXM of 700 W, and
        the cube root is 0.83. Memory and links keep their rates.

        Raises:
          ValueError: if `power` is None.
        """
        if self.power is None:
            raise ValueError(
                f"power_limit={watts:g}: the watts at which {self.name} has its full rate are not "
                "known: give power, too."
            )
        return replace(self, peak=self.peak * min(1.0, watts / self.power) ** (1 / 3))


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        # DGX H100: NVLink 4, a 400 Gb/s adapter for each device.
        Hardware("h100", 989.5e12, 85.5e9, 3.35e12, 8, 450e9, 50e9, power=700),
        # Eight of them gather tokens sooner than they exchange them from top-6 on, not from top-8.
        Hardware(
            *("h800", 989e12, 85.5e9, 3.4e12, 8, 200e9, 50e9),
            exchange=6 / 8,
            price=5.28,
            power=700,
        ),
        Hardware("h200", 989.5e12, 141e9, 4.8e12, 8, 450e9, 50e9, power=700),
        # DGX A100: NVLink 3, 200 Gb/s adapters.
        Hardware("a100", 312e12, 85.5e9, 2.0e12, 8, 300e9, 25e9, power=400),
        Hardware("a800", 312e12, 85.5e9, 2.039e12, 8, 200e9, 25e9, price=2.26, power=400),
        Hardware("h20", 148e12, 102e9, 4.0e12, 8, 450e9, 50e9, price=1.85),
        # PCIe 4 x16, and an adapter of 200 Gb/s for two devices.
        Hardware("l40s", 362e12, 48e9, 0.864e12, 8, 32e9, 12.5e9, price=1.08),
        Hardware("l20", 119.5e12, 48e9, 0.864e12, 8, 32e9, 12.5e9, price=1.0),
        Hardware("b200", 2250e12, 192e9, 7.7e12, 8, 900e9, 50e9, power=1000),
        # A rack of 72, with an adapter of 400 Gb/s each.
        Hardware("gb200", 2500e12, 186e9, 8.0e12, 72, 900e9, 50e9, power=1200),
        # Adapters of 800 Gb/s.
        Hardware("b300", 2250e12, 288e9, 8.0e12, 8, 900e9, 100e9),
        # A torus: a collective over one of its axes uses two of a chip's six links.
        Hardware("v5p", 459e12, 102e9, 2.765e12, 8960, 180e9, 6.25e9, 1e-6, 30e-6),
        # Of four links; two adapters of 100 Gb/s for eight chips.
        Hardware("v5e", 197e12, 16e9, 0.819e12, 256, 90e9, 3.125e9, 1e-6, 30e-6),
        Hardware("v6e", 918e12, 32e9, 1.638e12, 256, 180e9, 12.5e9, 1e-6, 30e-6),
        # Half a chip is a device of JAX, with half the rate of the chip's six links.
        Hardware("v7x", 1153.5e12, 103e9, 3.69e12, 18432, 90e9, 6.25e9, 1e-6, 30e-6),
        # A few cores; the devices are threads that share one memory. Eight of them on two cores
        # gather sooner if an exchange sends more than 43 (bfloat16) to 47 % (float32) as much.
        Hardware(
            *("laptop", 0.2e12, 16e9, 50e9, 1024, 10e9, 10e9, 20e-6, 20e-6),
            exchange=0.45,
            overlaps=False,
        ),
    )
}
"""Jin et al., "MegaScale-MoE", 2025 (H800, A100, H20); Zhu et al., "MegaScale-Infer", 2025 (L40S,
A800, L20, and all prices: https://arxiv.org/abs/2504.02263); vendors' datasheets (GB200: 186 GB, as
MLCommons' results list it; HGX B300: 36 PFLOP/s of eight with sparsity, which doubles the rate);
https://docs.cloud.google.com/tpu/docs (TPUs) and, for the rate of their links, Austin et al., "How
to Scale Your Model", 2025 (https://jax-ml.github.io/scaling-book/tpus)."""
TPUS = ("v5p", "v5e", "v6e", "v7x")
NAMES_IN_JAX = {"tpu v5": "v5p", "tpu v5 lite": "v5e", "tpu v6 lite": "v6e", "tpu7x": "v7x"}
"""Devices by JAX's `device_kind`, if it does not contain their name here."""


UNKNOWN = Hardware("unknown links", 1.0, 1.0, 1.0, 2**31, 1.0, 1.0, 0.0, 0.0)
"""Stands for devices that are not in the table: times are proportional to the bytes sent."""


def parse(text: str) -> tuple[Hardware, int]:
    """The device and how many of it: ``"h100x64"``, or ``"cluster.json x64"`` (`read_hardware`).

    Raises:
      ValueError: on another spelling, an unknown device or a file that describes none.
    """
    match = re.fullmatch(r"(.+?\.json)\s*x([1-9]\d*)", text)
    if match is not None:
        return read_hardware(match[1]), int(match[2])
    match = re.fullmatch(r"([a-z0-9]+?)x([1-9]\d*)", text)
    if match is None or match[1] not in HARDWARE:
        raise ValueError(
            f"hardware {text!r} is not a device type and a number: write for example h100x64, with "
            f"one of {', '.join(HARDWARE)}, or FILE.json x64."
        )
    return HARDWARE[match[1]], int(match[2])


def read_hardware(path: str | Path) -> Hardware:
    """A device of one's own, from a JSON file with the fields of `Hardware`.

    ``{"like": "h100", "outside": 25e9}`` is an H100 with another adapter, and ``{"like": "h100",
    "power_limit": 500}`` one that is limited to 500 W (`Hardware.limited`). Without "like" all
    rates, `memory` and `domain` are needed; the name defaults to the name of the file.

    Raises:
      ValueError: where the file does not describe a device.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: it must hold the fields of a device.") from error
    if not isinstance(values, dict):
        raise ValueError(f'{path} holds no object: write for example {{"like": "h100"}}.')
    like, limit = values.pop("like", None), values.pop("power_limit", None)
    if limit is not None:
        _check_field(path, "power_limit", limit)
    if like is not None and (not isinstance(like, str) or like not in HARDWARE):
        raise ValueError(f"{path}: like={like!r} is not known: use one of {', '.join(HARDWARE)}.")
    names = [field.name for field in fields(Hardware)]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(
            f"{path}: {unknown[0]!r} is not known: use like, power_limit, {', '.join(names)}."
        )
    values.setdefault("name", path.stem)
    for name, value in values.items():
        _check_field(path, name, value)
    missing = [] if like is not None else [name for name in names[1:7] if name not in values]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: add them, or a device that it is like."
        )
    hardware = Hardware(**values) if like is None else replace(HARDWARE[like], **values)
    try:
        return hardware if limit is None else hardware.limited(limit)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_field(path: Path, name: str, value: Any) -> None:
    """Raises:
    ValueError: if a field of a device cannot have this value.
    """
    if name == "name":
        fits, rule = isinstance(value, str), "text"
    elif name == "overlaps":
        fits, rule = isinstance(value, bool), "true or false"
    elif name == "domain":
        fits, rule = type(value) is int and value > 0, "a whole number of devices above 0"
    else:
        is_number = type(value) in (int, float) and value < float("inf")
        fits, rule = is_number and value >= 0, "a number of SI units, not below 0"
        if not name.startswith("latency"):
            fits, rule = fits and value > 0, "a number of SI units above 0"
    if not fits:
        raise ValueError(f"{path}: {name}={value!r} must be {rule}.")


def find_hardware(kind: str) -> Hardware | None:
    """The accelerator that JAX calls `kind`; None for a CPU and for an unknown device.

    Examples:
      >>> find_hardware("NVIDIA H100 80GB HBM3").name
      'h100'
    """
    if kind.lower() in NAMES_IN_JAX:
        return HARDWARE[NAMES_IN_JAX[kind.lower()]]
    words = kind.lower().replace("-", " ").split()
    return next((HARDWARE[word] for word in words if word in HARDWARE and word != "laptop"), None)
