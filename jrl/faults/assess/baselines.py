"""What Minder is compared with: Mahalanobis distances, and Minder with one part taken away.

Each is a detector like `Minder`, with a threshold chosen on the same simulated fleets by the same
rule (``python -m jrl.faults benchmark --calibrate``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from jrl.faults.collect.vocabulary import meaning
from jrl.faults.minder import vae
from jrl.faults.minder.continuity import Span
from jrl.faults.minder.detect import Minder, Record, Report, shipped_models
from jrl.faults.minder.embedding import (
    View,
    as_points,
    denoised,
    raw,
    side_by_side,
    whitened_moments,
)
from jrl.faults.minder.train import ANY, TOGETHER, Training, healthy_fleets, train_joint
from jrl.faults.simulate.metrics import PRODUCTION

ALL = "all metrics"
"""What an alarm names where no single metric is compared."""
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
    each = [models.get(meaning(name), models[ANY]) for name in metrics]
    return [View(ALL, tuple(range(len(metrics))), side_by_side(each))]


def joint(metrics: tuple[str, ...]) -> list[View]:
    """INT: one model for all metrics, one distance.

    That of `PRODUCTION` comes with the package; another is trained at first use, in a minute.
    """
    return [View(ALL, tuple(range(len(metrics))), denoised(joint_model(metrics)))]


@cache
def joint_model(metrics: tuple[str, ...]) -> vae.Weights:
    """A model of these metrics together, as large as theirs and as long trained."""
    if metrics == PRODUCTION:
        return shipped_models()[TOGETHER]
    training = Training()
    return train_joint(healthy_fleets(training, metrics), training)


@dataclass(frozen=True)
class Instant(Minder):
    """Minder without continuity: the greatest score of a metric is an alarm if it is high enough.

    Attributes:
      continuity: not used.
      stride: windows from one that is looked at to the next.
    """

    continuity: float | int = 0
    stride: int = 8

    def judge(self, record: Record) -> Report:
        """Looks at one metric after the other until one has a score above the threshold."""
        prepared = record.prepared
        if record.refused:
            return Report([], (*prepared.notes, *record.refused), prepared)
        starts = np.arange(0, prepared.values.shape[2] - vae.WINDOW + 1, self.stride)
        for view in self.method(prepared.metrics):
            looker = record.looker(view, self)
            looker.look(starts)
            scores = np.full(looker.scores.shape, np.nan, np.float32)
            scores[starts] = looker.scores[starts]
            top = int(np.nanargmax(scores))
            if scores[top] > self.threshold:
                span = Span(int(looker.machine[top]), top, top, 1)
                return Report(
                    [self._alarm(prepared, view.name, span, scores)], prepared.notes, prepared
                )
        return Report([], prepared.notes, prepared)


@dataclass(frozen=True)
class Contestant:
    """A detector of the benchmark.

    Attributes:
      name: in the table.
      make: the detector with a given threshold.
      threshold: its own, chosen on fleets of other seeds than the benchmark's.
    """

    name: str
    make: Callable[[float], Minder]
    threshold: float

    @property
    def detector(self) -> Minder:
        """The detector with its threshold."""
        return self.make(self.threshold)


CONTESTANTS = (
    Contestant("Minder", lambda at: Minder(threshold=at), Minder.threshold),
    Contestant("Mahalanobis", lambda at: Minder(threshold=at, method=mahalanobis), 1.19),
    Contestant("no VAE (RAW)", lambda at: Minder(threshold=at, method=without_vae), 1.43),
    Contestant("concatenated (CON)", lambda at: Minder(threshold=at, method=concatenated), 1.3),
    Contestant("one joint model (INT)", lambda at: Minder(threshold=at, method=joint), 1.67),
    Contestant("no continuity", lambda at: Instant(threshold=at), 12.4),
)
"""In the order of the table; the first is the detector itself. One `Minder.ready` serves all."""
