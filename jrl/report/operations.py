"""Largest operations of a profile: read from the traces of `jax.profiler`, for report.html."""

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jrl.runs import records

NUM_OPERATIONS = 10
RECORDINGS = Path("plugins/profile")
"""Folder of recordings that TensorBoard looks for."""
SUMMARY = "operations.json"
CONTROL_FLOW = re.compile(r"(while|call|conditional|async-(start|done|update))([.\d]*)")
"""Operations whose time is also the time of the operations that they run."""


def write_operations(recording: Path, first: int, last: int, process: int) -> None:
    """Writes the largest operations of a finished recording beside its trace.

    Args:
      recording: folder with the recording's ``.xplane.pb``.
      first: first step of the recording.
      last: last step of the recording, inclusive.
      process: process that recorded it.
    """
    totals = defaultdict[tuple[str, str], float](float)
    for path in recording.glob("*.xplane.pb"):
        for name, program, seconds in _operations(path):
            totals[name, program] += seconds
    everything = sum(totals.values())
    largest = sorted(totals.items(), key=lambda item: -item[1])[:NUM_OPERATIONS]
    content = {
        "first": first,
        "last": last,
        "process": process,
        "seconds": everything,
        "operations": [
            {"name": name, "program": program, "seconds": seconds}
            for (name, program), seconds in largest
        ],
    }
    records.replace(recording / SUMMARY, (json.dumps(content, indent=2) + "\n").encode())


def read_recordings(profiles: Path) -> list[dict[str, Any]]:
    """The finished recordings of a run by their first step, as `write_operations` wrote them, with
    the path of the ``trace`` inside of `profiles`."""
    found = []
    for path in (profiles / RECORDINGS).glob(f"*/{SUMMARY}"):
        content = records.read_object(path, "delete it, or put it back as it was")
        traces = sorted(path.parent.glob("*.trace.json.gz"))
        trace = traces[0].relative_to(profiles).as_posix() if traces else None
        found.append({**content, "trace": trace})
    return sorted(found, key=lambda each: (each["first"], each["process"]))


def _operations(path: Path) -> Iterator[tuple[str, str, float]]:
    """Name, compiled program and seconds of each operation that a device executed.

    GPUs and TPUs have planes of their own, with a line for each stream or for all operations. On a
    CPU the operations are among the events of the host's threads.
    """
    from jax.profiler import ProfileData  # here, as a report is also written without a trace

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own types
        planes = list(ProfileData.from_file(str(path)).planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:")]
        for plane in devices or planes:
            for line in plane.lines:
                is_operations = line.name.startswith(("Stream", "XLA Ops"))
                if plane in devices and not is_operations:
                    continue
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" not in stats and not is_operations:
                        continue
                    name = str(stats.get("hlo_op", event.name)).removeprefix("%").split(" = ")[0]
                    if not CONTROL_FLOW.fullmatch(name):
                        yield name, str(stats.get("hlo_module", "")), event.duration_ns / 1e9
