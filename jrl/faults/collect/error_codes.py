"""XID errors of NVIDIA's driver: meaning of each code, and its usual cause (machine or program).

DCGM's ``DCGM_FI_DEV_XID_ERRORS`` is the code of the last error, not a count. The cause follows the
action that NVIDIA's catalogue recommends. It is the machine, its links, firmware and driver
included, where the GPU is to be reset, the machine restarted or its support contacted immediately.
It is the program where the program is to be debugged. Else it is unknown.

https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sharding.former_names import former_members

Cause = Literal["machine", "program", "unknown"]
CAUSES: tuple[Cause, ...] = ("machine", "program", "unknown")


@dataclass(frozen=True)
class ErrorCode:
    """Meaning and usual cause of an XID code.

    Attributes:
      code: as the driver logs it.
      meaning: in a few words.
      cause: the usual one, one of `CAUSES`.
      handled: true if the machine has recovered by itself, so that no action is needed.
    """

    code: int
    meaning: str
    cause: Cause
    handled: bool = False

    __getattr__ = former_members(number="code")

    def describe(self) -> str:
        """One phrase: the code, its meaning and its usual cause."""
        whose = {
            "machine": "machine fault",
            "program": "usually a program fault",
            "unknown": "unknown cause",
        }[self.cause]
        handled = ", which handled it" if self.handled else ""
        return f"XID {self.code} ({self.meaning}; {whose}{handled})"

    @property
    def severity(self) -> int:
        """Severity rank: of several codes at the same time the one with the greatest counts."""
        return 0 if not self.code else 1 + (self.cause != "program") + 2 * self.is_alarming

    @property
    def is_alarming(self) -> bool:
        """True if the machine needs attention."""
        return self.cause == "machine" and not self.handled


_MACHINE = {
    32: "corrupted push buffer, often the PCIe link",
    46: "GPU stopped processing and needs a reset",
    48: "uncorrectable (double bit) ECC error",
    54: "auxiliary power is not connected",
    57: "memory link training failed",
    58: "memory error",
    62: "internal microcontroller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault, often hardware",
    119: "GSP firmware did not answer",
    120: "GSP firmware error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU could not be initialised",
    144: "NVLink SAW error",
    145: "NVLink RLW error",
    146: "NVLink TLW error",
    147: "NVLink TREX error",
    148: "NVLink controller error",
    149: "NVLink network interface error",
    150: "NVLink MSE error",
    154: "recovery of the GPU is required, after another error",
    156: "resource retired, reset needed",
    157: "resource could not be retired",
    158: "GPU does not answer",
    167: "PCIe does not answer",
    168: "errors in protected memory",
    169: "security microcontroller halted",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}
_HANDLED = {
    63: "memory row remapped",
    92: "many corrected single bit ECC errors",
    93: "InfoROM wear limit",
    121: "corrected errors of the link to the CPU",
    160: "channel retired",
    162: "power smoothing on again",
    163: "power smoothing off",
    164: "power smoothing near the end of its life",
    165: "power smoothing at the end of its life",
}
_PROGRAM = {
    11: "invalid push buffer",
    13: "illegal instruction or address in a kernel",
    14: "injected by a program",
    25: "illegal push buffer",
    31: "memory page fault, an illegal address",
    43: "program stopped by its own fault",
    45: "program ended or killed, often after another error",
    69: "error in the use of the graphics engine",
    106: "test message",
    107: "test message",
    137: "illegal access over NVLink",
}
_UNKNOWN = {
    8: "GPU stopped processing",
    37: "driver firmware error",
    38: "driver firmware watchdog",
    44: "fault during a context switch",
    60: "video processor exception",
    61: "internal microcontroller breakpoint",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    68: "video decoder exception",
    78: "virtual GPU could not be started",
    80: "corrupted data sent to the GPU",
    141: "CUDA fast path error",
    151: "key rotation error",
    155: "NVLink taken down by software",
    159: "error on the link to the CPU",
    161: "channel could not be retired",
}
_UNKNOWN |= dict.fromkeys(
    (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine exception"
)
_UNKNOWN |= dict.fromkeys(
    (82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142), "media engine exception"
)

_TABLES: tuple[tuple[dict[int, str], Cause, bool], ...] = (
    (_MACHINE, "machine", False),
    (_HANDLED, "machine", True),
    (_PROGRAM, "program", False),
    (_UNKNOWN, "unknown", False),
)
XID = {
    code: ErrorCode(code, meaning, cause, handled)
    for table, cause, handled in _TABLES
    for code, meaning in table.items()
}
"""The codes of NVIDIA's catalogue that are in use, and those of older GPUs that say hardware."""


def error_code(code: float | int | np.floating) -> ErrorCode:
    """Returns the entry of a code; the cause of one that is not in the catalogue is unknown."""
    return XID.get(int(code), ErrorCode(int(code), "not in the catalogue", "unknown"))


def most_severe(codes: Iterable[float | int | np.floating]) -> float | int | np.floating:
    """The code with the greatest `ErrorCode.severity`; of equal ones the greatest number."""
    return max(codes, key=lambda code: (error_code(code).severity, code))
