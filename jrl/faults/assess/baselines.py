"""Baselines of the default detector: simple detectors, Minder, and ablations of Minder.

Each has a threshold chosen on the same simulated fleets by the same
rule (``python -m jrl.faults benchmark --calibrate``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from jaxtyping import Float

from jrl.faults.assess.train import Training, healthy_fleets, train_joint
from jrl.faults.collect.fleet import NO_MACHINE, Alarm, Fleet
from jrl.faults.collect.vocabulary import PRIORITY, PRODUCTION, meaning, search_order
from jrl.faults.minder import vae
from jrl.faults.minder.continuity import Span, find_span, score_where_needed
from jrl.faults.minder.detect import Minder, MinderReport, ScoredFleet, report_incomparable
from jrl.faults.minder.embedding import (
    View,
    as_points,
    denoised,
    raw,
    side_by_side,
    whitened_moments,
)
from jrl.faults.minder.models import ANY, JOINT, shipped_models
from jrl.faults.outlier import MAD_TO_STD, nan_median
from jrl.faults.shift import ShiftDetector, heavy_tailed

ALL = "all metrics"
"""Metric of an alarm where no single metric is compared."""
MOMENTS = 60
"""Samples over which the baseline takes its moments."""


def mahalanobis(metrics: tuple[str, ...]) -> list[View]:
    """One view: whitened moments of all metrics over `MOMENTS` seconds, see `whitened_moments`.

    Moments of eight samples are mostly noise, and the paper does not give the baseline's window: it
    gets a longer one than the detector.
    """
    return [View(ALL, tuple(range(len(metrics))), as_points, MOMENTS, whitened_moments)]


def without_vae(metrics: tuple[str, ...]) -> list[View]:
    """RAW: each metric as it was recorded."""
    return [View(name, (channel,), raw) for channel, name in enumerate(metrics)]


def concatenated(metrics: tuple[str, ...]) -> list[View]:
    """CON: the denoised metrics side by side, one distance."""
    models = shipped_models()
    weights = [models.get(meaning(name), models[ANY]) for name in metrics]
    return [View(ALL, tuple(range(len(metrics))), side_by_side(weights))]


def joint(metrics: tuple[str, ...]) -> list[View]:
    """INT: one model for all metrics, one distance.

    The model of `PRODUCTION` is in the package; any other is trained at first use, in a minute, and
    so is that one where the package's models were replaced by some of records.
    """
    return [View(ALL, tuple(range(len(metrics))), denoised(joint_model(metrics)))]


@cache
def joint_model(metrics: tuple[str, ...]) -> vae.Weights:
    """One model for all of these metrics, as large and as long trained as the per-metric models."""
    if metrics == PRODUCTION and JOINT in shipped_models():
        return shipped_models()[JOINT]
    training = Training()
    return train_joint(healthy_fleets(training, metrics), training)


@dataclass(frozen=True)
class Instant(Minder):
    """Minder without continuity: the greatest score of a metric is an alarm if it is high enough.

    Attributes:
      continuity: not used.
      stride: windows from one that is scored to the next.
    """

    continuity: float | int = 0
    stride: int = 8

    def judge(self, record: ScoredFleet) -> MinderReport:
        """Searches the metrics in order until one has a score above the threshold."""
        prepared = record.prepared
        if record.reasons:
            return report_incomparable(record)
        starts = np.arange(0, prepared.values.shape[2] - vae.WINDOW + 1, self.stride)
        for view in self.method(prepared.metrics):
            scorer = record.scorer(view, self)
            scorer.score(starts)
            scores = np.full(scorer.scores.shape, np.nan, np.float32)
            scores[starts] = scorer.scores[starts]
            top = int(np.nanargmax(scores))
            if scores[top] > self.threshold:
                span = Span(int(scorer.machine[top]), top, top, 1)
                alarm = self._alarm(prepared, view.name, span, scores)
                return MinderReport([alarm], prepared.notes, prepared=prepared)
        return MinderReport([], prepared.notes, prepared=prepared)


@dataclass(frozen=True)
class MinderOnset(Minder):
    """Minder with an onset rule: at least half of a deviation has to be new for that machine.

    Outlier machines without such an onset are skipped, and the search continues.
    """

    def judge(self, record: ScoredFleet) -> MinderReport:
        """Searches the metrics in order until one has a machine with a new deviation."""
        if record.reasons:
            return report_incomparable(record)
        prepared = record.prepared
        num_windows = prepared.values.shape[2] - vae.WINDOW + 1
        length = self._continuity_windows(prepared.period)
        for view in self.method(prepared.metrics):
            scorer = record.scorer(view, self)
            score_windows = partial(scorer.name_machines, threshold=self.threshold)
            named = score_where_needed(score_windows, num_windows, length=length, share=self.share)
            values = prepared.values[view.channels[0]]
            away = values - np.median(values, axis=0)
            while (span := find_span(named, length=length, share=self.share)) is not None:
                if _is_new(away[span.machine], span):
                    alarm = self._alarm(prepared, view.name, span, scorer.scores)
                    return MinderReport([alarm], prepared.notes, prepared=prepared)
                named = np.where(named == span.machine, NO_MACHINE, named)
        return MinderReport([], prepared.notes, prepared=prepared)


def _is_new(away: np.ndarray, span: Span) -> bool:
    """True if at least half of a machine's deviation in a span is new, compared with before it."""
    during = float(np.median(away[span.first + vae.WINDOW - 1 : span.last + vae.WINDOW]))
    if span.first < vae.WINDOW:
        return False
    return abs(during - float(np.median(away[: span.first]))) >= abs(during) / 2


@dataclass(frozen=True)
class RobustZ:
    """The plain detector: medians of `window` seconds, in spreads of the machines of each window.

    ``|x - median| / max(1.4826 MAD, resolution)`` over machines; the greatest above the threshold
    is the candidate, and the one that stays it as long as for Minder is named. No training and no
    order but that of the metrics.

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
        for name, scores in self.scores(fleet).items():
            span = self.span(scores, self.threshold, fleet.period)
            if span is not None:
                return [self.alarm(fleet, name, span)]
        return []

    def alarm(self, fleet: Fleet, metric: str, span: Span) -> Alarm:
        """The alarm of a span of windows."""
        step = max(1, round(self.hop / fleet.period)) * fleet.period
        since, until = fleet.start + span.first * step, fleet.start + span.last * step
        return Alarm(fleet.machines[span.machine], metric, since, until + self.window)

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

    def span(self, scores: np.ndarray, threshold: float, period: float | int) -> Span | None:
        """The windows through which one machine is the candidate, if there are enough."""
        leader = np.where(scores.max(axis=0) > threshold, scores.argmax(axis=0), NO_MACHINE)
        length = round((self.continuity - self.window + self.hop) / max(self.hop, period))
        return find_span(leader, length=length, share=self.share)


def moving_median(metrics: tuple[str, ...]) -> list[View]:
    """A median of eight samples in place of the LSTM-VAE."""
    return [
        View(name, (channel,), as_points, summary=partial(_smooth, np.median))
        for channel, name in enumerate(metrics)
    ]


def moving_mean(metrics: tuple[str, ...]) -> list[View]:
    """RAW, as smooth as the reconstruction of the LSTM-VAE: the mean of eight samples."""
    return [
        View(name, (channel,), as_points, summary=partial(_smooth, np.mean))
        for channel, name in enumerate(metrics)
    ]


def _smooth(middle: Callable[..., np.ndarray], values: np.ndarray, width: int) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=2)
    # The size of eight equal samples, in which `Minder.floor` is measured.
    return (middle(windows, axis=3) * vae.WINDOW**0.5).astype(np.float32)


AnyDetector = Minder | RobustZ | ShiftDetector


@dataclass(frozen=True)
class BenchmarkEntry:
    """A detector of the benchmark.

    Attributes:
      name: in the table.
      make: the detector with a given threshold.
      threshold: its own, chosen on fleets of other seeds than the benchmark's.
    """

    name: str
    make: Callable[[float], AnyDetector]
    threshold: float

    @property
    def detector(self) -> AnyDetector:
        """The detector with its threshold."""
        return self.make(self.threshold)


DETECTORS = (
    BenchmarkEntry(
        "shift (default)",
        lambda threshold: ShiftDetector(threshold=threshold),
        ShiftDetector.threshold,
    ),
    BenchmarkEntry("robust z", lambda threshold: RobustZ(threshold), 9.12),
    BenchmarkEntry("robust z, logs", lambda threshold: RobustZ(threshold, logs=True), 9.12),
    BenchmarkEntry(
        "moving median", lambda threshold: Minder(threshold=threshold, method=moving_median), 5.11
    ),
    BenchmarkEntry("Minder", lambda threshold: Minder(threshold=threshold), Minder.threshold),
    BenchmarkEntry(
        "Minder, onset rule", lambda threshold: MinderOnset(threshold=threshold), Minder.threshold
    ),
    BenchmarkEntry(
        "Mahalanobis", lambda threshold: Minder(threshold=threshold, method=mahalanobis), 1.19
    ),
    BenchmarkEntry(
        "no VAE (RAW)", lambda threshold: Minder(threshold=threshold, method=without_vae), 1.43
    ),
    BenchmarkEntry(
        "no VAE, smoothed", lambda threshold: Minder(threshold=threshold, method=moving_mean), 6.78
    ),
    BenchmarkEntry(
        "concatenated (CON)",
        lambda threshold: Minder(threshold=threshold, method=concatenated),
        1.3,
    ),
    BenchmarkEntry(
        "one joint model (INT)", lambda threshold: Minder(threshold=threshold, method=joint), 1.67
    ),
    BenchmarkEntry("no continuity", lambda threshold: Instant(threshold=threshold), 12.4),
)
"""In the order of the table; the first is the default. All subclasses of `Minder` share one
`Minder.prepare_fleet`."""
