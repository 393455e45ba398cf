"""Embeddings of windows, distances of the machines in them, and outlier scores.

A view takes a subset of the metrics and embeds their windows ``[channel, window, machine, sample]``
as points ``[window, dim, machine]``. Minder has one view per metric; its ablations have one view of
all, or leave the denoising out (`benchmarks.faults.baselines`).

Before that a recorded fleet is prepared. Minder aligns time stamps, fills gaps with the nearest
sample and scales each metric to [0, 1] by its least and greatest value. `Fleet` is on one clock
already, so only machines whose clocks are off by whole seconds are aligned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from jrl.faults.collect.fleet import Fleet
from jrl.faults.minder import vae

BLOCK = 16
"""Machines that all others are compared with in one step of the loop."""
MANY_DIMS = 16
"""Beyond these, Euclidean distances come from products of matrices."""

Channels = Float[np.ndarray, "channel machine time"]
Windows = Float[Array, "channel window machine time"]
Points = Float[Array, "window dim machine"]
Embedding = Callable[[Windows], Points]
MIN_SHARE = 0.5
"""Minimum share of samples of each compared metric that a machine needs to be compared."""


@dataclass(frozen=True)
class View:
    """Metrics that are compared together, and their embedding.

    Attributes:
      name: its name in an alarm: a metric, or a name for multiple.
      channels: indices of its metrics in the prepared fleet.
      embed: from their windows to points.
      width: samples of a window. It ends where the detector's window of 8 ends; more samples reach
        further back.
      summary: from the channels of a whole record and the width to a summary of each window,
        ``[dim, machine, window]``, which then goes through `embed` as windows of one sample; None
        embeds the windows themselves.
    """

    name: str
    channels: tuple[int, ...]
    embed: Embedding
    width: int = vae.WINDOW
    summary: Callable[[np.ndarray, int], np.ndarray] | None = None


Method = Callable[[tuple[str, ...]], list[View]]
"""From the metrics of a prepared fleet to its views, in the order in which they are searched."""


def gather(
    values: Float[np.ndarray, "metric machine time"], starts: np.ndarray, width: int = vae.WINDOW
) -> np.ndarray:
    """Windows of `width` samples that begin at `starts`: ``[metric, window, machine, time]``."""
    view = np.lib.stride_tricks.sliding_window_view(values, width, axis=2)
    return np.ascontiguousarray(np.moveaxis(view[:, :, starts], 2, 1))


@jax.jit
def denoise(weights: vae.Weights, windows: Windows) -> Points:
    """Windows as a model reconstructs them; a model of all channels joins them (ablation INT)."""
    channels, count, machines, width = windows.shape
    flat = windows.reshape(channels, count * machines, width)
    rebuilt = vae.reconstruct(weights, jnp.transpose(flat, (2, 0, 1)))
    points = rebuilt.reshape(width * channels, count, machines)
    return jnp.swapaxes(points, 0, 1)


@jax.jit
def distance_sums(
    points: Points, machine_mask: Bool[Array, " machine"]
) -> Float[Array, "window machine"]:
    """Sum of the distances from each machine to all in the mask: ``d_i = sum_j |e_i - e_j|``.

    The matrix of distances is never materialized: `BLOCK` of its columns are computed and added at
    a time, so that they need as much memory as the points. Cost: ``window machine^2 dim``
    operations. Points of more than `MANY_DIMS` go through `sums_by_products`.

    Args:
      machine_mask: true on machines; the rest is padding. The number of machines is a multiple of
        `BLOCK`.

    References:
      Deng et al., "Minder", NSDI 2025, section 4.4. https://arxiv.org/abs/2411.01791
    """
    num_windows, num_dims, num_machines = points.shape
    if num_dims > MANY_DIMS:
        return sums_by_products(points, machine_mask)
    others = points.reshape(num_windows, num_dims, num_machines // BLOCK, BLOCK)
    weights = machine_mask.reshape(-1, BLOCK).astype(points.dtype)

    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        columns, weight = block
        for j in range(BLOCK):
            differences = [points[:, k] - columns[:, k, j][:, None] for k in range(num_dims)]
            squares = [difference * difference for difference in differences]
            total = total + weight[j] * jnp.sqrt(sum(squares[1:], squares[0]))
        return total, None

    blocks = (jnp.moveaxis(others, 2, 0), weights)
    return jax.lax.scan(add, jnp.zeros((num_windows, num_machines), points.dtype), blocks)[0]


def sums_by_products(
    points: Points, machine_mask: Bool[Array, " machine"]
) -> Float[Array, "window machine"]:
    """`distance_sums` by ``|a - b|^2 = |a|^2 + |b|^2 - 2 a b``, one window's matrix at a time.

    Points are taken from their mean. What cancels leaves an error of about 1e-3 of the farthest
    point's distance from it for two equal points, and far less for others.
    """
    weight = machine_mask.astype(points.dtype)
    itself = jnp.eye(points.shape[2], dtype=bool)

    def sum_window(window: Float[Array, "dim machine"]) -> Float[Array, " machine"]:
        centred = window - (window * weight[None]).sum(1, keepdims=True) / weight.sum()
        square = jnp.square(centred).sum(0, keepdims=True)
        ones = jnp.ones_like(square)
        # The squares as two more rows of the product: a pass over the matrix less for each.
        left = jnp.concatenate([-2 * centred, square, ones]).T
        squared = left @ jnp.concatenate([centred, ones, square])
        return jnp.sqrt(jnp.where(itself, 0, jnp.maximum(squared, 0))) @ weight

    return jax.lax.map(sum_window, points)


def normal_score(
    sums: Float[Array, "window machine"],
    machine_mask: Bool[Array, " machine"],
    *,
    floor: float | Float[Array, ""] = 0.0,
) -> Float[Array, "window machine"]:
    """Mean distance of a machine to the others over the mean distance among the others.

    ``s_i = d_i (n - 2) / (T - 2 d_i)`` with ``T = sum_i d_i`` over n machines: 1 in expectation for
    a machine like the others for any n, and unbounded for an outlier. The paper's normaliser is not
    published; the standard score, a candidate, is at most ``sqrt(n - 1)``: little in a small fleet.

    Args:
      sums: what `distance_sums` returns.
      machine_mask: true on machines, at least 3: of two machines, either may be the outlier.
        Padding scores 0.
      floor: lower bound of the distances among the others, in units of the embedding.
    """
    counts = machine_mask.astype(sums.dtype)
    n = counts.sum()
    total = jnp.sum(jnp.where(machine_mask[None], sums, 0), axis=1, keepdims=True)
    among = jnp.maximum(total - 2 * sums, 0) / ((n - 1) * (n - 2))
    # Rounding leaves distances of about 1e-7 among equal points, which need a floor.
    among = jnp.maximum(among, jnp.maximum(floor, 1e-6))
    return jnp.where(machine_mask[None], sums / (n - 1) / among, 0)


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
