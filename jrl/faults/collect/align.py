"""Alignment of the records of multiple processes, each with its own clock, as one fleet on one.

Ticks are whole seconds. A sample belongs to the tick nearest to its time, whatever the order they
were written in; of multiple samples at one tick the last written counts. A tick without a sample is
NaN: the detector fills gaps. Processes that cannot be compared are left out and reported.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.record import Record
from jrl.faults.collect.vocabulary import mask_valid

MAX_AGE = 10.0
"""Seconds without a sample after which a machine is not compared."""
MAX_AHEAD = 5.0
"""Seconds by which samples may be ahead: later ones are of a wrong clock, and left out."""


@dataclass(frozen=True)
class Process:
    """State of one process.

    Attributes:
      machine, host: its name, and that of its host.
      state: "running", "silent" (no new sample, or a clock that is behind), "ended", "no data" or
        "clock ahead"; only the running are compared.
      age: seconds from its newest sample to the end of the fleet; negative for a clock that is
        ahead, NaN without a sample.
      damaged: rows its files lost to a wrong checksum.
      torn: bytes at the end of its files that are not a full row.
      future: samples left out because they are ahead of the fleet's clock.
    """

    machine: str
    host: str
    state: str
    age: float | int
    damaged: int
    torn: int
    future: int


@dataclass(frozen=True)
class Aligned:
    """Aligned records.

    Attributes:
      fleet: the processes that are running, on one clock.
      processes: all of them, in the order of their names.
    """

    fleet: Fleet
    processes: tuple[Process, ...]


def align(
    records: Iterable[Record], *, now: float | int | None = None, seconds: float | int = 900.0
) -> Aligned:
    """Aligns records on one clock.

    Args:
      records: multiple records of one machine are those of a restarted process.
      now: Unix time of the end; None takes the median of the machines' newest samples, which no
        single wrong clock can move far.
      seconds: how far back to look.

    Returns:
      The fleet of the running machines. Its metrics are those that any of them has.

    Raises:
      ValueError: for `seconds` that are not finite and above 0.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds={seconds} must be a finite number of seconds above 0.")
    records_by_machine: defaultdict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.machine, record.begun)):
        records_by_machine[record.machine].append(record)
    if now is None:
        newest = [_newest(each) for each in records_by_machine.values()]
        times = [time for time in newest if math.isfinite(time)]
        now = float(np.median(times)) if times else 0.0
    # The grid ends at the tick nearest to the latest sample that counts.
    start = float(math.floor(now) - math.ceil(seconds) + 1)
    processes = tuple(_process_state(each, now) for each in records_by_machine.values())
    running = [process.machine for process in processes if process.state == "running"]
    compared = [record for machine in running for record in records_by_machine[machine]]
    metrics = sorted({name for record in compared for name in record.columns})
    length = math.ceil(seconds) + math.ceil(MAX_AHEAD)
    values = np.full((len(running), len(metrics), length), np.nan, np.float32)
    for row, name in enumerate(running):
        for record in records_by_machine[name]:
            _write_samples(values[row], record, metrics, start)
    # Up to the last tick at which any machine has a sample.
    used = np.flatnonzero(np.isfinite(values).any(axis=(0, 1)))
    values = values[:, :, : used[-1] + 1 if used.size else 0]
    return Aligned(Fleet(tuple(running), tuple(metrics), start, values=values), processes)


def _newest(records: Sequence[Record]) -> float:
    """Unix time of the newest sample, NaN without one."""
    return max(
        (float(record.times.max()) for record in records if len(record.times)), default=math.nan
    )


def _process_state(records: Sequence[Record], now: float | int) -> Process:
    last = max(records, key=lambda record: record.begun)
    times = np.concatenate([record.times for record in records])
    future = int((times > now + MAX_AHEAD).sum())
    within = times[times <= now + MAX_AHEAD]
    if len(times) == 0:
        state = "no data"
    elif future and (len(within) == 0 or now - within.max() > MAX_AGE):
        state = "clock ahead"
    elif last.ended:
        state = "ended"
    else:
        state = "silent" if now - within.max() > MAX_AGE else "running"
    return Process(
        machine=last.machine,
        host=last.host,
        state=state,
        age=now - _newest(records),
        damaged=sum(record.damaged for record in records),
        torn=sum(record.torn for record in records),
        future=future,
    )


def _write_samples(
    values: np.ndarray, record: Record, metrics: Sequence[str], start: float
) -> None:
    """Writes the samples of one record at their ticks; later written samples overwrite earlier."""
    ticks = np.floor(record.times - start + 0.5)
    inside = np.flatnonzero((ticks >= 0) & (ticks < values.shape[1]))[::-1]
    tick, last = np.unique(ticks[inside].astype(int), return_index=True)
    for name, samples in zip(record.columns, record.values[inside[last]].T, strict=True):
        valid_samples = np.where(mask_valid(name, samples), samples, np.nan)
        values[metrics.index(name), tick] = valid_samples
