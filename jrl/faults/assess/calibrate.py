"""Thresholds: for each detector the highest with the best F1 on simulated fleets kept for this.

Scores do not depend on the threshold, so each record is scored once, every eighth window, and all
thresholds are tried on these scores. The seeds are neither those of the benchmark nor those that
models are trained on.
"""

from functools import partial

import numpy as np
from rich.progress import track

from jrl.faults.assess.baselines import CONTESTANTS, Instant
from jrl.faults.assess.outcomes import FOUND, SILENT, WRONG, figures
from jrl.faults.minder import vae
from jrl.faults.minder.continuity import NOBODY, find_span
from jrl.faults.minder.detect import Minder
from jrl.faults.minder.workers import side_by_side
from jrl.faults.simulate import Settings, simulate

SEED = 100_000
STRIDE = 8
THRESHOLDS = np.round(1 + 0.02 * 1.12 ** np.arange(64), 3)
"""Tried for every detector: from 1.02 to 26, denser near 1, which is what sound machines have."""


def calibrate(settings: Settings, incidents: int, seed: int, processes: int | None) -> int:
    """Prints, for each detector, the best threshold and its figures on these fleets.

    Args:
      settings: of the records.
      incidents: how many.
      seed: added to their seeds.
      processes: records at a time; None takes one per core.
    """
    seeds = range(SEED + seed, SEED + seed + incidents)
    jobs = side_by_side(partial(outcomes_by_threshold, settings), seeds, processes)
    rows = list(track(jobs, "records", total=len(seeds)))
    for column, contestant in enumerate(CONTESTANTS):
        each = [
            figures([row[column][at] for row in rows], resamples=1) for at in range(len(THRESHOLDS))
        ]
        f1 = np.array([found.f1[0] for found in each])
        # Of those as good as the best the highest: false alarms in health are no part of F1.
        at = int(np.flatnonzero(f1 >= f1.max() - 0.005)[-1])
        print(
            f"{contestant.name:<24} threshold {THRESHOLDS[at]:<6} "
            f"precision {each[at].precision[0]:.3f} recall {each[at].recall[0]:.3f} F1 {f1[at]:.3f}"
        )
    return 0


def outcomes_by_threshold(settings: Settings, seed: int) -> list[list[str]]:
    """For each detector and threshold, what it makes of one incident."""
    incident = simulate(settings, seed)
    record = CONTESTANTS[0].detector.ready(incident.fleet)
    if record.refused:
        return [[SILENT] * len(THRESHOLDS) for _ in CONTESTANTS]
    prepared = record.prepared
    starts = np.arange(0, prepared.values.shape[2] - vae.WINDOW + 1, STRIDE)
    truth = None if incident.machine is None else incident.fleet.machines.index(incident.machine)
    when = (incident.start - prepared.start, incident.end - prepared.start)
    out = []
    for minder in (contestant.detector for contestant in CONTESTANTS):
        series = []
        for view in minder.method(prepared.metrics):
            looker = record.looker(view, minder)
            looker.look(starts)
            series.append((prepared.rows[looker.machine[starts]], looker.scores[starts]))
        out.append([_verdict(series, minder, at, truth, when) for at in THRESHOLDS])
    return out


def _verdict(
    series: list[tuple[np.ndarray, np.ndarray]],
    minder: Minder,
    threshold: float,
    truth: int | None,
    when: tuple[float, float],
) -> str:
    """As the detector itself decides, with every eighth window."""
    length = (round(float(minder.continuity)) - vae.WINDOW + 1) // STRIDE
    for machine, score in series:
        if isinstance(minder, Instant):
            top = int(score.argmax())
            found = (int(machine[top]), top, top) if score[top] > threshold else None
        else:
            named = np.where(score > threshold, machine, NOBODY)
            span = find_span(named, length=length, share=minder.share)
            found = None if span is None else (span.machine, span.first, span.last)
        if found is not None:
            who, first, last = found
            overlap = first * STRIDE < when[1] and (last + 1) * STRIDE > when[0]
            return FOUND if who == truth and overlap else WRONG
    return SILENT
