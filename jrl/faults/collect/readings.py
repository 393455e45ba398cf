"""Validity of readings: DCGM's blank values and values out of a metric's range are not readings.

DCGM writes a number for "blank", and the next ones for "not found", "not supported" and "not
permitted"; its own test treats all that is not below the first as blank. Exporters pass them on as
if they were measured. https://github.com/NVIDIA/DCGM/blob/master/dcgmlib/dcgm_structs.h
"""

import numpy as np

from jrl.faults.collect.vocabulary import exported_name, of_any_gpu

BLANKS = (
    (float(0x7FFFFFF0), float(0x7FFFFFFF)),  # of 32 bits, and of fields that were once such
    (2.0**47, 2.0**47 + 15),  # of floating point; counters of 64 bits go on beyond it
    (float(0x7FFFFFFFFFFFFFF0), np.inf),  # of 64 bits, as a double: 2^63 and beyond
)
"""The least and the greatest number of each of DCGM's kinds of blanks."""
BEYOND = np.finfo(np.float64).max
PERCENT = (0.0, 100.0)
CELSIUS = (-40.0, 150.0)

RANGES = {
    # Fractions or per cent, as an exporter has them.
    "gpu/duty_cycle": PERCENT,
    "gpu/memory_bandwidth": PERCENT,
    "gpu/engine_activity": PERCENT,
    "gpu/sm_activity": PERCENT,
    "gpu/tensor_activity": PERCENT,
    "gpu/temperature": CELSIUS,
    "gpu/temperature/memory": CELSIUS,
    "gpu/power": (0.0, 1e4),  # watts
    "gpu/clock/sm": (0.0, 1e4),  # MHz
    "gpu/clock/memory": (0.0, 1e5),
    "gpu/memory": (0.0, 1e8),  # MiB
    # Bytes or MiB a second.
    "gpu/pcie/in": (0.0, 1e13),
    "gpu/pcie/out": (0.0, 1e13),
    "gpu/nvlink/in": (0.0, 1e14),
    "gpu/nvlink/out": (0.0, 1e14),
    "gpu/xid": (0.0, 9999.0),
    "gpu/ecc/uncorrected": (0.0, 1e9),
    "gpu/rows/remap_failure": (0.0, 1.0),
    "memory/ecc/uncorrected": (0.0, 1e12),
    "rdma/link_downed": (0.0, 2.0**32 - 2),  # a counter of 32 bits stays at its greatest number
    "memory/host": (0.0, 1e18),
    "memory/process": (0.0, 1e18),
    "step/time": (0.0, 1e9),  # seconds
}
"""Valid range of each metric, ends included, by the sampler's name, in any unit it may have."""
_RANGES = RANGES | {exported_name(name): limits for name, limits in RANGES.items()}


def limits(name: str) -> tuple[float, float]:
    """The least and the greatest value of a recorded metric."""
    return _RANGES.get(of_any_gpu(name), (-BEYOND, BEYOND))


def mask_blanks(readings: np.ndarray) -> np.ndarray:
    """Mask of the readings that are DCGM's blank values."""
    mask = np.zeros(readings.shape, bool)
    for least, greatest in BLANKS:
        mask |= (readings >= least) & (readings <= greatest)
    return mask


def mask_valid(name: str, readings: np.ndarray) -> np.ndarray:
    """Mask of the readings in the valid range of a recorded metric; false for NaN and infinity."""
    least, greatest = limits(name)
    return (readings >= least) & (readings <= greatest)
