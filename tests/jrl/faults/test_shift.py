"""Shifts against a machine's own record: who is named, who is not, at any step of scraping."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.faults.simulate import Settings, simulate
from jrl.faults import shift
from jrl.faults.collect.fleet import Fleet
from jrl.faults.shift import Grid, ShiftDetector, heavy_tailed, onset_scores

DETECTOR = ShiftDetector()


def fleet(machines=9, metrics=("a",), seconds=600, period=1.0, seed=0):
    random = np.random.default_rng(seed)
    shape = (machines, len(metrics), int(seconds / period))
    values = 50 + 3 * random.standard_normal(shape).astype(np.float32)
    return Fleet(tuple(f"m{i}" for i in range(machines)), metrics, 1000.0, period, values)


def test_the_scores_against_the_definition_in_loops():
    random = np.random.default_rng(1)
    away = random.normal(size=(4, 60))
    away[random.random(away.shape) < 0.1] = np.nan
    away[2, 12:] += 12
    away[1] += 0.25 * np.arange(-30, 30)
    away[0, 40:] -= 3
    away[3] += np.repeat([0, 8, 4, 1, 8], [24, 8, 8, 2, 18])
    grid = Grid(width=3, part=3, hop=1, overlap=3, length=8, recent=4, lag=6)
    scores, sides = onset_scores(away, grid, 0.75)
    few, _ = onset_scores(away, grid, 0.75, 1.0)
    np.testing.assert_array_equal(few[scores.max(axis=1) >= 1], scores[scores.max(axis=1) >= 1])
    assert (few.max(axis=1) > 0).any() and (few <= scores).all()
    assert scores.shape == (4, 60 - 3 - 8 + 1)
    for row in range(4):
        for moment in range(scores.shape[1]):
            best = 0.0
            # After a level's length the past is that until the last `recent` windows.
            last = moment if moment < 8 else moment // 4 * 4
            for side in (1, -1):
                stretch = np.sort(side * away[row, moment + 3 : moment + 11])
                stretch = stretch[np.isfinite(stretch)]
                level = stretch[int(0.25 * len(stretch) + 1e-9)]
                parts = (away[row, last::-3], away[row, max(0, moment - 3) : moment + 1])
                means = [np.median(side * p[np.isfinite(p)]) for p in parts if np.isfinite(p).any()]
                # The trend: a level's length of windows, and as many before those.
                latest = np.nanmedian(side * away[row, max(0, moment - 7) : moment + 1])
                trend = 0.0
                if moment >= 15:
                    earlier = np.nanmedian(side * away[row, moment - 15 : moment - 7])
                    trend = max(0.0, latest - earlier) * (3.5 + 3 + 2) / 8
                new = level - max(0.0, *means, latest + trend)
                if new >= level / 2 and level > -min(means, default=0.0):
                    best = max(best, new)
            assert scores[row, moment] == pytest.approx(best, abs=1e-5)
    assert scores.max(axis=1).argmax() == 2 and sides[2, scores[2].argmax()] == 1


@pytest.mark.parametrize("period", [1, 5, 15, 30])
def test_the_verdict_is_the_same_at_any_step(period):
    incident = simulate(Settings(machines=24, period=period, fault="GPU card drop"), 3)
    (alarm,) = DETECTOR(incident.fleet)
    assert alarm.machine == incident.machine and alarm.metric in incident.shown
    assert alarm.start == pytest.approx(incident.start, abs=75)
    assert alarm.end == pytest.approx(incident.end, abs=75)


def test_shift_detector_ignores_lasting_and_names_new_deviation():
    lasting = fleet()
    lasting.values[4] += 20
    assert DETECTOR(lasting) == []
    # Of a machine that was off already less than half is new.
    lasting.values[4, 0, 300:] += 15
    assert DETECTOR(lasting) == []
    lasting.values[4, 0, 300:] += 15
    (alarm,) = DETECTOR(lasting)
    assert alarm.machine == "m4" and alarm.start == pytest.approx(1300, abs=40)


def test_a_gap_in_a_shift_leaves_its_level_and_its_end():
    shifted = fleet(seconds=900)
    shifted.values[4, 0, 300:] += 20
    (whole,) = DETECTOR(shifted)
    shifted.values[4, 0, 400:440] = np.nan
    (with_gap,) = DETECTOR(shifted)
    assert (with_gap.start, with_gap.end) == (whole.start, whole.end)
    assert with_gap.evidence["level"] == pytest.approx(whole.evidence["level"], rel=0.05)
    shifted.values[4, 0, 700:] = np.nan
    (silent,) = DETECTOR(shifted)
    assert silent.end == pytest.approx(1700, abs=30)


def test_drifts_returns_and_short_slowdowns_are_no_alarm():
    values = fleet()
    values.values[3, 0] += np.linspace(0, 3, 600, dtype=np.float32)
    values.values[5, 0, 200:350] -= 20  # back after 150 s
    values.values[6, 0, :200] += 20  # was off, and recovered
    values.values[:, :, 400:] *= 0.5  # all together
    assert DETECTOR(values) == []


def drifting(spreads, slowdown=0.0):
    """Half an hour in which machine 3 drifts by so many spreads in four minutes, from one side of
    the others to the other side; from 900 s on it is slower for a minute."""
    values = fleet(seconds=1800)
    # The mean of the middle half of 30 readings with a standard deviation of 3 has one of 0.6.
    values.values[3, 0] += spreads * 0.6 / 240 * np.arange(-600, 1200, dtype=np.float32)
    values.values[3, 0, 900:960] -= slowdown
    return values


def greatest_score(values):
    return max(DETECTOR.examine(values).traces["a"].scores)


@pytest.mark.parametrize("spreads", [-6, -4, 4, 6])
def test_a_steady_drift_is_no_onset_and_a_step_on_top_of_it_is(spreads):
    values = drifting(spreads)
    assert greatest_score(values) < 0.5
    values.values[3, 0, 900:] += np.sign(spreads) * 5
    (alarm,) = DETECTOR(values)
    assert alarm.machine == "m3" and alarm.start == pytest.approx(1900, abs=40)


def test_a_slowdown_that_recovers_does_not_make_a_drift_an_onset():
    assert DETECTOR(drifting(6, slowdown=20.0)) == []


def test_without_the_trend_a_drift_and_a_slowdown_are_an_onset(monkeypatch):
    monkeypatch.setattr(shift, "sorted_median", lambda ordered: ordered[..., 0] * np.nan)
    (alarm,) = DETECTOR(drifting(6, slowdown=20.0))
    assert alarm.machine == "m3"


def test_shift_detector_combines_metrics_of_a_gpu():
    names = ("gpu0/duty_cycle", "gpu0/power", "gpu0/sm_activity", "gpu0/engine_activity")
    small = fleet(12, (*names, "cpu/process"))
    small.values[7, :4, 250:] -= 2.2
    (alarm,) = DETECTOR(small)
    assert alarm.machine == "m7" and alarm.evidence["metrics together"] == 4
    assert DETECTOR(small.select(names[:1])) == []


def test_rates_of_events_are_compared_in_logarithms():
    random = np.random.default_rng(2)
    rates = np.exp(random.normal(0, 1.0, (10, 1, 700))).astype(np.float32)
    rates[random.random(rates.shape) < 0.01] = 1e4
    rates[2, 0, 300:] *= 4
    events = Fleet(tuple("abcdefghij"), ("network/pfc",), 0.0, 1.0, rates)
    assert heavy_tailed(rates[:, 0]) and not heavy_tailed(fleet().values[:, 0])
    assert [alarm.machine for alarm in DETECTOR(events)] == ["c"]


def test_gaps_and_wild_readings_neither_alarm_nor_hide_a_shift():
    random = np.random.default_rng(3)
    gaps = fleet(seed=3)
    gaps.values[1, 0, 280:] += 9
    gaps.values[random.random(gaps.values.shape) < 0.4] = np.nan
    gaps.values[random.random(gaps.values.shape) < 0.02] = 1e6
    gaps.values[8, 0, 200:500] = np.nan
    assert [alarm.machine for alarm in DETECTOR(gaps)] == ["m1"]


def test_one_of_many_machines_that_shift_is_no_outlier():
    rack = fleet(60)
    rack.values[0, 0, 300:] += 4
    assert [alarm.machine for alarm in DETECTOR(rack)] == ["m0"]
    rack.values[1:20, 0, 300:] += 4
    assert DETECTOR(rack) == []
    rack.values[7, 0, 300:] += 30  # ten spreads always count
    assert [alarm.machine for alarm in DETECTOR(rack)] == ["m7"]


def test_shifts_of_others_count_before_the_first_moment_of_an_onset_too():
    rack = fleet(60, seconds=900)
    rack.values[0, 0, 500:] += 4
    assert [alarm.machine for alarm in ShiftDetector(past=360)(rack)] == ["m0"]
    rack.values[1:20, 0, 150:] += 4
    assert ShiftDetector(past=360)(rack) == []


def test_an_onset_needs_as_much_before_it_as_the_setting():
    early = fleet(seconds=900)
    early.values[4, 0, 200:] += 10
    assert [alarm.machine for alarm in ShiftDetector(past=180)(early)] == ["m4"]
    assert ShiftDetector(past=240)(early) == []
    report = ShiftDetector(past=240).examine(fleet(seconds=450))
    assert not report.comparable and "less than the 480 s" in report.notes[0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (fleet(2), "two cannot tell"),
        (fleet(seconds=200), "holds 200 s, less than the 270 s"),
        (fleet(seconds=7200, period=120.0), "scrape at least every 60 s"),
        (replace(fleet(), values=np.full((9, 1, 600), 7, np.float32)), "is 7 everywhere"),
        (replace(fleet(), values=np.full((9, 1, 600), np.nan, np.float32)), "fewer than 3"),
    ],
)
def test_what_cannot_be_compared_is_said(bad, words):
    report = DETECTOR.examine(bad)
    assert not report.comparable and report.alarms == []
    assert any(words in note for note in report.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0.0}, "window=0.0 must be"),
        ({"share": 0.5}, "share=0.5 must lie"),
        ({"past": -1}, "past=-1 must be"),
        ({"continuity": 50}, "continuity=50 must be at least two windows"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ShiftDetector(**changes)
