"""Calibration of thresholds on simulated fleets with seeds that nothing else uses.

Scores do not depend on the threshold. So each record is scored once (every eighth window for
`Minder` and its subclasses), and all thresholds are tried on these scores. A detector's threshold
is that of the best F1 among those with alarms in at most one of a hundred clean records, or if
there is none, among those with the fewest. On a tie it is the highest.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from rich.progress import track

from benchmarks.faults.baselines import DETECTORS, AnyDetector, Instant, RobustZ, ShiftDetector
from benchmarks.faults.outcomes import DETECTED, SILENT, WRONG, figures, map_in_processes, outcome
from benchmarks.faults.simulate import Incident, Settings, simulate
from jrl.faults.collect.fleet import NO_MACHINE
from jrl.faults.minder import vae
from jrl.faults.minder.detect import Minder, ScoredFleet, Span, find_span

SEED = 100_000
CLEAN_SEED = 150_000
STRIDE = 8
THRESHOLDS = np.round(1 + 0.02 * 1.12 ** np.arange(64), 3)
"""Thresholds tried for every detector: 1.02 to 26, denser near 1, the score of healthy machines."""
FALSE_ALARMS = 0.01
"""Maximum share of clean records with an alarm."""


def calibrate(
    names: tuple[str, ...],
    settings: tuple[Settings, Settings],
    counts: tuple[int, int],
    seed: int,
    processes: int | None,
) -> int:
    """Prints, for each detector, the best threshold and its figures on these fleets.

    Args:
      settings: of records with a fault and without.
      counts: how many of each.
      processes: records at a time; None takes one per core.
    """
    faulty, clean = settings
    jobs = [(faulty, SEED + seed + i) for i in range(counts[0])]
    jobs += [(clean, CLEAN_SEED + seed + i) for i in range(counts[1])]
    score_record = partial(outcomes_by_threshold, names)
    rows = list(track(map_in_processes(score_record, jobs, processes), "records", total=len(jobs)))
    by_detector = np.swapaxes(rows, 0, 1)
    for name, outcomes in zip(names, by_detector, strict=True):
        of_faulty, of_clean = outcomes[: counts[0]], outcomes[counts[0] :]
        each = [figures(of_threshold, resamples=1) for of_threshold in of_faulty.T.tolist()]
        alarms = (of_clean != SILENT).sum(axis=0)
        f1 = np.array([entry.f1[0] for entry in each])
        allowed = alarms <= max(FALSE_ALARMS * counts[1], alarms.min())
        best = f1[allowed].max(initial=0.0)
        index = int(np.flatnonzero(allowed & (f1 >= best - 0.005))[-1])
        print(
            f"{name:<24} threshold {THRESHOLDS[index]:<6} precision {each[index].precision[0]:.3f} "
            f"recall {each[index].recall[0]:.3f} F1 {f1[index]:.3f} false alarms {alarms[index]}"
        )
    return 0


def outcomes_by_threshold(names: tuple[str, ...], job: tuple[Settings, int]) -> list[list[str]]:
    """Outcome of one record, for each detector and threshold."""
    settings, seed = job
    incident = simulate(settings, seed)
    record = Minder().prepare_fleet(incident.fleet)
    return [_outcomes(DETECTORS[name], incident, record) for name in names]


def _outcomes(detector: AnyDetector, incident: Incident, record: ScoredFleet) -> list[str]:
    if isinstance(detector, ShiftDetector):
        alarms = ShiftDetector(threshold=float(THRESHOLDS[0]))(incident.fleet)
        score = float(alarms[0].evidence["score"]) if alarms else 0.0
        return [outcome(incident, alarms if score >= threshold else []) for threshold in THRESHOLDS]
    if isinstance(detector, RobustZ):
        scores = detector.scores(incident.fleet)
        return [
            outcome(incident, replace(detector, threshold=threshold).alarms(incident.fleet, scores))
            for threshold in THRESHOLDS
        ]
    if record.reasons:
        return [SILENT] * len(THRESHOLDS)
    prepared = record.prepared
    starts = np.arange(0, prepared.values.shape[2] - vae.WINDOW + 1, STRIDE)
    truth = None if incident.machine is None else incident.fleet.machines.index(incident.machine)
    when = (incident.start - prepared.start, incident.end - prepared.start)
    series = []
    for view in detector.method(prepared.metrics):
        scorer = record.scorer(view, detector)
        scorer.score(starts)
        series.append((prepared.rows[scorer.machine[starts]], scorer.scores[starts]))
    return [_verdict(series, detector, threshold, truth, when) for threshold in THRESHOLDS]


def _verdict(
    series: list[tuple[np.ndarray, np.ndarray]],
    minder: Minder,
    threshold: float,
    truth: int | None,
    when: tuple[float, float],
) -> str:
    """Outcome of one record by the detector's own rule, with every eighth window."""
    length = (round(float(minder.continuity)) - vae.WINDOW + 1) // STRIDE
    for machine, score in series:
        if isinstance(minder, Instant):
            top = int(score.argmax())
            span = Span(int(machine[top]), top, top, 1) if score[top] > threshold else None
        else:
            named = np.where(score > threshold, machine, NO_MACHINE)
            span = find_span(named, length=length, share=minder.share)
        if span is not None:
            overlap = span.first * STRIDE < when[1] and (span.last + 1) * STRIDE > when[0]
            return DETECTED if span.machine == truth and overlap else WRONG
    return SILENT
