"""Baselines of the default detector: simple detectors, Minder, and ablations of Minder.

Each has a threshold chosen on the same simulated fleets by the same rule (``python -m jrl.faults
benchmark --calibrate``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from benchmarks.faults.models import SimulatedTraining, healthy_fleets, train_joint
from jrl.faults.collect.fleet import NO_MACHINE, Alarm, Fleet
from jrl.faults.collect.vocabulary import PRIORITY, PRODUCTION, meaning, search_order
from jrl.faults.minder import vae
from jrl.faults.minder.detect import UNSEEN, Minder, Search, Span, WindowScorer, find_span
from jrl.faults.minder.embedding import Channels, Points, Prepared, View, Windows, denoise
from jrl.faults.outlier import MAD_TO_STD, nan_median
from jrl.faults.shift import ShiftDetector, heavy_tailed

ALL = "all metrics"
"""Metric of an alarm if no single metric is compared."""
MOMENTS = 60
"""Samples over which the baseline computes its moments."""


def mahalanobis(metrics: tuple[str, ...]) -> list[View]:
    """One view: whitened moments of all metrics over `MOMENTS` seconds, see `whitened_moments`.

    Moments of eight samples are mostly noise, and the paper does not give the baseline's window: it
    gets a longer one than the detector.
    """
    return [View(ALL, tuple(range(len(metrics))), as_points, MOMENTS, whitened_moments)]


def without_vae(metrics: tuple[str, ...]) -> list[View]:
    """RAW: each metric as recorded."""
    return [View(name, (channel,), raw) for channel, name in enumerate(metrics)]


def concatenated(metrics: tuple[str, ...]) -> list[View]:
    """CON: the denoised metrics concatenated, with one distance."""
    models = vae.shipped_models()
    weights = [models.get(meaning(name), models[vae.ANY]) for name in metrics]
    stacked = {name: jnp.stack([each[name] for each in weights]) for name in weights[0]}
    return [View(ALL, tuple(range(len(metrics))), partial(side_by_side, stacked))]


def joint(metrics: tuple[str, ...]) -> list[View]:
    """INT: one model for all metrics, one distance.

    The model of `PRODUCTION` is in the package; any other is trained at first use, in a minute, and
    so is that one where the package's models were replaced by some of records.
    """
    return [View(ALL, tuple(range(len(metrics))), partial(denoise, joint_model(metrics)))]


@cache
def joint_model(metrics: tuple[str, ...]) -> vae.Weights:
    """One model for all of these metrics, as large and as long trained as the per-metric models."""
    if metrics == PRODUCTION and vae.JOINT in vae.shipped_models():
        return vae.shipped_models()[vae.JOINT]
    training = SimulatedTraining()
    return train_joint(healthy_fleets(training, metrics), training)


@dataclass(frozen=True)
class Instant(Minder):
    """Minder without continuity: the greatest score of a metric is an alarm if it is high enough.

    Every eighth window is scored; `continuity` is not used.
    """

    continuity: float | int = 0

    def _search(self, scorer: WindowScorer, prepared: Prepared) -> Search:
        starts = np.arange(0, scorer.scores.size, 8)
        named = np.full(scorer.scores.size, UNSEEN)
        named[starts] = scorer.name_machines(starts, self.threshold)
        scores = np.where(named == UNSEEN, np.nan, scorer.scores)
        top = int(np.nanargmax(scores))
        span = Span(int(named[top]), top, top, 1) if named[top] != NO_MACHINE else None
        return named, scores, span


@dataclass(frozen=True)
class MinderOnset(Minder):
    """Minder with an onset rule: at least half of a deviation has to be new for that machine.

    Outlier machines without such an onset are skipped, and the search continues.
    """

    def _search(self, scorer: WindowScorer, prepared: Prepared) -> Search:
        named, scores, span = super()._search(scorer, prepared)
        values = prepared.values[scorer.view.channels[0]]
        away = values - np.median(values, axis=0)
        length = self._continuity_windows(prepared)
        while span is not None and not _is_new(away[span.machine], span):
            named = np.where(named == span.machine, NO_MACHINE, named)
            span = find_span(named, length=length, share=self.share)
        return named, scores, span


def _is_new(away: np.ndarray, span: Span) -> bool:
    """True if at least half of a machine's deviation in a span is new, compared with before it."""
    during = float(np.median(away[span.first + vae.WINDOW - 1 : span.last + vae.WINDOW]))
    if span.first < vae.WINDOW:
        return False
    return abs(during - float(np.median(away[: span.first]))) >= abs(during) / 2


@dataclass(frozen=True)
class RobustZ:
    """Detector without training: medians of `window` seconds, in spreads of the machines per
    window.

    ``|x - median| / max(1.4826 MAD, resolution)`` over machines; the greatest above the threshold
    is the candidate, and one that remains it as long as for Minder is named. It needs no training
    and no order except that of the metrics.

    Attributes:
      logs: true if heavy-tailed metrics are compared in logarithms.
    """

    threshold: float
    logs: bool = False
    window: float = 30.0
    hop: float = 10.0
    continuity: float = 240.0
    share: float = 0.85
    resolution: float = 0.01

    def __call__(self, fleet: Fleet) -> list[Alarm]:
        return self.alarms(fleet, self.scores(fleet))

    def alarms(self, fleet: Fleet, scores: Mapping[str, np.ndarray]) -> list[Alarm]:
        """The alarm of the first metric with one machine as the candidate for long enough."""
        length = round((self.continuity - self.window + self.hop) / max(self.hop, fleet.period))
        for metric, of_metric in scores.items():
            top = of_metric.max(axis=0)
            leader = np.where(top > self.threshold, of_metric.argmax(axis=0), NO_MACHINE)
            span = find_span(leader, length=length, share=self.share)
            if span is not None:
                step = max(1, round(self.hop / fleet.period)) * fleet.period
                since, until = (fleet.start + each * step for each in (span.first, span.last))
                machine = fleet.machines[span.machine]
                return [Alarm(machine, metric, since, until + self.window)]
        return []

    def scores(self, fleet: Fleet) -> dict[str, Float[np.ndarray, "machine window"]]:
        """Scores by metric; 0 where there are no samples."""
        width, hop = (max(1, round(s / fleet.period)) for s in (self.window, self.hop))
        scores = {}
        for name in search_order(PRIORITY, fleet.metrics):
            values = fleet.values[:, fleet.metrics.index(name)]
            typical = float(np.nanmedian(np.abs(values)))
            if self.logs and heavy_tailed(values):
                values = typical * np.log(np.maximum(values, 0) / max(typical, 1e-30) + 0.1)
            windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=1)[:, ::hop]
            middle = nan_median(windows, 2)
            away = np.abs(middle - nan_median(middle, 0))
            spread = np.maximum(MAD_TO_STD * nan_median(away, 0), self.resolution * typical)
            scores[name] = np.nan_to_num(away / np.maximum(spread, 1e-30))
        return scores


def smoothed(middle: Callable[..., np.ndarray], metrics: tuple[str, ...]) -> list[View]:
    """A median or mean of eight samples in place of the LSTM-VAE.

    The mean is RAW, as smooth as the reconstruction of the LSTM-VAE.
    """
    summary = partial(_smooth, middle)
    return [
        View(name, (channel,), as_points, summary=summary) for channel, name in enumerate(metrics)
    ]


def _smooth(middle: Callable[..., np.ndarray], values: np.ndarray, width: int) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=2)
    # The size of eight equal samples, in which `Minder.floor` is measured.
    return (middle(windows, axis=3) * vae.WINDOW**0.5).astype(np.float32)


@jax.jit
def side_by_side(weights: vae.Weights, windows: Windows) -> Points:
    """Each channel through its own model, then all concatenated as one point (ablation CON)."""
    points = jax.vmap(denoise)(weights, windows[:, None])
    return jnp.moveaxis(points, 0, 1).reshape(points.shape[1], -1, points.shape[3])


@jax.jit
def raw(windows: Windows) -> Points:
    """The windows of one metric without a model (ablation RAW)."""
    return jnp.swapaxes(windows[0], 1, 2)


@jax.jit
def as_points(windows: Windows) -> Points:
    """Windows of one sample as points whose dimensions are the channels."""
    return jnp.swapaxes(windows[..., 0], 0, 1)


def whitened_moments(values: Channels, width: int) -> Float32[np.ndarray, "dim machine window"]:
    """The baseline's points: four moments of each metric, whitened by the covariance of one record.

    Mean, standard deviation, skewness and kurtosis over the window; principal components that hold
    95 % of the variance, each scaled to variance 1. The Euclidean distance of two such points is
    the Mahalanobis distance of the machines. (The paper describes its baseline in these words
    only.)

    The covariance is that of machines around the median of their fleet, over the whole record: the
    machines of one window are fewer than their 28 features in a small fleet, and points whitened by
    themselves are then equally far from each other. As in robust covariances, it is that of the
    half of the points nearest to the median: a machine that fails for minutes is no part of what is
    usual.
    """
    features = np.concatenate([four_moments(channel, width) for channel in values])
    matrix = whitening(features[:, :, :: max(1, width // 4)], 0.95)
    points = matrix @ features.reshape(len(features), -1)
    return points.reshape(features.shape)


def four_moments(
    values: Float[np.ndarray, "machine time"], width: int
) -> Float32[np.ndarray, "4 machine window"]:
    """Mean, standard deviation, skewness and kurtosis of each window, from running sums of powers.

    Args:
      values: scaled to [0, 1], without gaps.
    """
    wide = values.astype(np.float64)
    power, means = np.ones_like(wide), []
    for _ in range(4):
        power *= wide
        total = np.cumsum(power, 1)
        total[:, width:] -= total[:, :-width].copy()
        means.append(total[:, width - 1 :] / width)
    m, m2, m3, m4 = means
    variance = np.maximum(m2 - m**2, 1e-6)  # a thousandth of the range, far above the rounding
    third = m3 - 3 * m * m2 + 2 * m**3
    fourth = m4 - 4 * m * m3 + 6 * m**2 * m2 - 3 * m**4
    each = (m, np.sqrt(variance), third / variance**1.5, fourth / variance**2)
    return np.stack(each).astype(np.float32)


def whitening(
    features: Float[np.ndarray, "feature machine window"], share: float
) -> Float32[np.ndarray, "feature feature"]:
    """The matrix that makes features uncorrelated with variance 1; rows left out are 0.

    The features are those of the half of the points nearest to their median. Components are kept,
    the largest first, until they hold `share` of the variance.
    """
    centred = features - np.median(features, 1, keepdims=True)
    rows = centred.reshape(len(features), -1).T.astype(np.float64)
    size = np.maximum(np.sqrt((rows**2).mean(0)), 1e-6)
    rows = rows / size
    far = (rows**2).sum(1)
    usual = rows[far <= np.median(far)]
    spread = np.maximum(np.sqrt((usual**2).mean(0)), 1e-6)
    usual, size = usual / spread, size * spread
    eigenvalues, eigenvectors = np.linalg.eigh(usual.T @ usual / len(usual))
    larger = np.cumsum(eigenvalues[::-1])[::-1] - eigenvalues
    retained = (larger < share * eigenvalues.sum()) & (eigenvalues > 1e-6 * eigenvalues.sum())
    inverse = np.where(retained, 1 / np.sqrt(np.where(retained, eigenvalues, 1)), 0)
    return ((eigenvectors * inverse).T / size).astype(np.float32)


AnyDetector = Minder | RobustZ | ShiftDetector

DETECTORS: dict[str, AnyDetector] = {
    "shift (default)": ShiftDetector(),
    "robust z": RobustZ(9.12),
    "robust z, logs": RobustZ(9.12, logs=True),
    "moving median": Minder(5.11, method=partial(smoothed, np.median)),
    "Minder": Minder(),
    "Minder, onset rule": MinderOnset(),
    "Mahalanobis": Minder(1.19, method=mahalanobis),
    "no VAE (RAW)": Minder(1.43, method=without_vae),
    "no VAE, smoothed": Minder(6.78, method=partial(smoothed, np.mean)),
    "concatenated (CON)": Minder(1.3, method=concatenated),
    "one joint model (INT)": Minder(1.67, method=joint),
    "no continuity": Instant(12.4),
}
"""By name, in the order of the table; the first is the default. Each threshold was chosen on fleets
of other seeds than the benchmark's. All subclasses of `Minder` share one `Minder.prepare_fleet`."""
