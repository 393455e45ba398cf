"""Measured times of attention and experts, in place of the roofline: ``--profile FILE``."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sharding.planner.hardware import HARDWARE
from sharding.planner.serving.times import Times, fit_line

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


def read(path: Path) -> dict[str, Profile]:
    """Reads measured times by device from a JSON file.

    Its form is ``{device: {side: {devices of a node: [[batch, seconds], ...]}}}``. Each list
    becomes the line that `sharding.planner.serving.times.fit_line` fits to it.

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


def _is_above_zero(number: Any) -> bool:
    return type(number) in (int, float) and math.isfinite(number) and number > 0
