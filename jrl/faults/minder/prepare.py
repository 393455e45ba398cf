"""Preprocessing of a recorded fleet: alignment, filling of gaps and scaling to [0, 1].

Minder aligns time stamps, fills gaps with the nearest sample and scales each metric by its least
and greatest value. `Fleet` is on one clock already, so only machines whose clocks are off by whole
seconds are aligned. What had to be left out is reported.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int

from jrl.faults.collect.fleet import Fleet

MIN_SHARE = 0.5
"""Minimum share of samples of each compared metric that a machine needs to be compared."""
Values = Float32[np.ndarray, "metric machine time"]


@dataclass(frozen=True)
class Prepared:
    """A fleet that can be compared.

    Attributes:
      machines, metrics: names of those that are compared, in the order of the fleet.
      rows: indices of the machines in the fleet.
      start: Unix time of column 0, in seconds.
      period: seconds between two samples.
      values: in [0, 1], without gaps.
      notes: what was left out and why, one line each.
    """

    machines: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: Int[np.ndarray, "machine"]
    start: float | int
    period: float | int
    values: Values
    notes: tuple[str, ...]


def prepare(fleet: Fleet, *, max_lag: int = 2) -> Prepared:
    """Drops what cannot be compared, aligns, fills and scales the rest.

    Args:
      max_lag: most samples by which a machine's record is moved against the others'.

    Returns:
      What is left: machines or metrics may be none. The fleet's own values are not changed.
    """
    values = np.moveaxis(fleet.values, 0, 1)
    notes: list[str] = []
    present = np.isfinite(values)
    columns = _columns(fleet, values, present, notes)
    rows = _rows(fleet, present[columns], notes)
    selected = np.ix_(columns, rows)
    return Prepared(
        tuple(fleet.machines[row] for row in rows),
        tuple(fleet.metrics[column] for column in columns),
        rows,
        fleet.start,
        fleet.period,
        scale(correct_lags(fill(values[selected], present[selected]), max_lag)),
        tuple(notes),
    )


def _columns(
    fleet: Fleet, values: np.ndarray, present: np.ndarray, notes: list[str]
) -> Int[np.ndarray, "column"]:
    """Metrics that have samples and vary."""
    columns = []
    for column, name in enumerate(fleet.metrics):
        samples = values[column][present[column]]
        if samples.size == 0:
            notes.append(f"metric {name!r} has no samples: not compared.")
        elif samples.min() == samples.max():
            notes.append(f"metric {name!r} is {samples[0]:g} everywhere: nothing to compare.")
        else:
            columns.append(column)
    return np.array(columns, int)


def _rows(fleet: Fleet, present: np.ndarray, notes: list[str]) -> Int[np.ndarray, "row"]:
    """Machines that have enough samples of every metric that is compared."""
    if present.shape[0] == 0 or present.shape[2] == 0:
        return np.arange(len(fleet.machines))
    share = present.mean(2).min(0)
    for row in np.flatnonzero(share < MIN_SHARE):
        what = "no data" if not present[:, row].any() else f"{share[row]:.0%} of the samples"
        notes.append(
            f"machine {fleet.machines[row]!r} has {what} in some metric: not compared. Check "
            "whether it still reports."
        )
    return np.flatnonzero(share >= MIN_SHARE)


def fill(values: Values, present: np.ndarray) -> Values:
    """Puts the nearest present sample of the row in each gap, the earlier one at equal distance.

    Every row needs one present sample, or is left as it is.
    """
    time = values.shape[2]
    absent = np.flatnonzero(~present)
    flat = values.reshape(-1).copy()
    if absent.size == 0 or time == 0:
        return flat.reshape(values.shape)
    # A run of absent samples ends at a present one or at the end of its row.
    new = np.r_[True, (np.diff(absent) > 1) | (absent[1:] % time == 0)]
    run = np.cumsum(new) - 1
    first = absent[new][run]
    last = absent[np.r_[new[1:], True]][run]
    before = np.where(first % time == 0, -1, first - 1)
    after = np.where(last % time == time - 1, -1, last + 1)
    earlier = (before >= 0) & ((after < 0) | (absent - before <= after - absent))
    source = np.where(earlier, before, after)
    has_source = source >= 0
    flat[absent[has_source]] = flat[source[has_source]]
    return flat.reshape(values.shape)


def correct_lags(values: Values, max_lag: int) -> Values:
    """Moves each machine's record by the lag at which it follows the fleet's mean best.

    The lag is one for all metrics, within ``max_lag`` samples either way; 0 is left only where
    another explains the record clearly better, and the ends repeat their last sample.
    """
    _, num_machines, time = values.shape
    if max_lag == 0 or time <= 4 * max_lag or num_machines < 3:
        return values
    mean = values.mean(1)
    mean = mean - mean.mean(1, keepdims=True)
    power = (mean**2).mean(1)
    inner = slice(max_lag, time - max_lag)
    lags = np.arange(-max_lag, max_lag + 1)
    follow = np.zeros((len(lags), num_machines), np.float32)
    for metric in np.flatnonzero(power > 0):
        moved = np.stack([mean[metric, max_lag - lag : time - max_lag - lag] for lag in lags])
        spread = values[metric].std() ** 2
        follow += moved @ values[metric][:, inner].T / np.float32(spread * len(lags))
    best = follow.argmax(0)
    unmoved = np.maximum(follow[max_lag], 0)
    clear = follow[best, np.arange(num_machines)] > 1.02 * unmoved + 0.01 * time
    lag = np.where(clear, lags[best], 0)
    out = values.copy()
    for shift in np.unique(lag[lag != 0]):
        where = np.clip(np.arange(time) + shift, 0, time - 1)
        out[:, lag == shift] = values[:, lag == shift][:, :, where]
    return out


def scale(values: Values) -> Values:
    """``(x - min) / (max - min)`` with the extremes of each metric over all machines and times."""
    if values.size == 0:
        return values
    low, high = values.min((1, 2), keepdims=True), values.max((1, 2), keepdims=True)
    width = np.where(high > low, high - low, np.float32(1))
    return (values - low) / width
