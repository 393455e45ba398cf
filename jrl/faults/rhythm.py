"""Length of a training step, from the rhythm of the GPUs' activity.

Within a step machines compute and communicate. Windows that are shorter than a step alternate
between the two, and a machine deviates only in a part of them. So windows are as long as a step.
"""

import numpy as np
from jaxtyping import Float

from jrl.faults.collect.fleet import Fleet
from jrl.faults.outlier import nan_median
from jrl.faults.pauses import activity_metrics, moving_mean

MAX_SAMPLED = 16
"""Maximum number of machines whose rhythm is averaged."""
ALTERNATES = 0.08
"""Least relative standard deviation, over the metrics of activity, by which windows alternate."""
CLEAR = 0.25
"""Least height of a peak of the autocorrelation above the least value before it."""
NEARLY = 0.8
"""Of peaks that are nearly as high the shortest is the step; the others are its multiples."""


def step_seconds(fleet: Fleet, longest: float | int, window: float | int) -> float:
    """Seconds of a training step of at most `longest`; 0 if means over `window` hardly alternate.

    If the step changes, as by a fault for which all wait, it is the longer of two: each half of the
    record has its own.
    """
    rows = np.random.default_rng(0).permutation(len(fleet.machines))[:MAX_SAMPLED]
    columns = [fleet.metrics.index(name) for name in activity_metrics(fleet)]
    most = int(longest / fleet.period)
    if not columns or most < 2:
        return 0.0
    half = fleet.num_samples // 2
    values = fleet.values[rows][:, columns].reshape(-1, fleet.num_samples)
    values = moving_mean(values, max(1, round(window / fleet.period)))
    lags = [_period(part, most) for part in (values[:, :half], values[:, half:])]
    return max(lags) * fleet.period


def _period(values: Float[np.ndarray, "row time"], most: int) -> int:
    """Lag, in samples, of the first high peak of the mean autocorrelation; 0 without one."""
    size = values.shape[1]
    if size < 3 * most:
        return 0
    middle = nan_median(values, 1)[:, None]
    rest = np.nan_to_num((values - middle) / np.maximum(np.abs(middle), 1e-9))
    # A pause is far from all else, once: it is limited to what a step does.
    limit = np.quantile(np.abs(rest), 0.8, axis=1, keepdims=True)
    rest = np.clip(rest, -limit, limit)
    rest -= rest.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(rest, 2 * size, axis=1)) ** 2
    correlation = np.fft.irfft(power.sum(axis=0))[: most + 2]
    if not correlation[0] > 0:
        return 0
    variance = correlation[0] / values.size
    correlation = correlation / correlation[0] * size / (size - np.arange(most + 2))
    before = np.minimum.accumulate(correlation)
    lags = np.arange(2, most + 1)
    peak = (correlation[lags] >= correlation[lags - 1]) & (
        correlation[lags] > correlation[lags + 1]
    )
    peak &= correlation[lags] * variance > ALTERNATES**2
    clear = peak & (correlation[lags] - before[lags] > CLEAR)
    if not clear.any():
        return 0
    high = clear & (correlation[lags] >= NEARLY * correlation[lags[clear]].max())
    return int(lags[high.argmax()])
