"""Simulated fleets: what a seed decides, the published mix, and whom a fault drags along."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.faults.simulate import FAULTS, METRICS, MIX, PRODUCTION, Settings, simulate
from benchmarks.faults.simulate.healthy import make_job


def test_a_seed_gives_one_fleet():
    settings = Settings(machines=5, seconds=120)
    first, again, other = (simulate(settings, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.fleet.values, again.fleet.values)
    assert (first.machine, first.fault) == (again.machine, again.fault)
    assert not np.array_equal(first.fleet.values, other.fleet.values, equal_nan=True)


@pytest.mark.parametrize(("machines", "seconds"), [(2, 60), (7, 91)])
def test_shapes_units_and_gaps(machines, seconds):
    metrics = ("disk_usage", "gpu_temperature", "pfc_tx_packet_rate")
    settings = Settings(machines=machines, seconds=seconds, metrics=metrics, missing=0.05)
    fleet = simulate(settings, 0).fleet
    assert fleet.values.shape == (machines, 3, seconds)
    assert fleet.metrics == metrics
    for column, name in enumerate(metrics):
        values = fleet.values[:, column]
        assert np.nanmin(values) >= 0
        # Rounded to float32.
        assert np.nanmax(values) <= 1.2 * METRICS[name].capacity * (1 + 1e-6)
    assert 0 < np.isnan(fleet.values).mean() < 0.5


def test_sizes_are_drawn_from_4_to_1500():
    sizes = [
        len(simulate(Settings(seconds=60, metrics=("cpu_usage",)), s).fleet.machines)
        for s in range(40)
    ]
    assert min(sizes) >= 4
    assert max(sizes) <= 1500
    # Log-uniform: half of them below sqrt(4 * 1500) = 77; 40 draws miss it by 12 one time in 1e4.
    assert 8 <= sum(size < 77 for size in sizes) <= 32


def test_the_mix_is_the_published_one():
    assert sum(MIX.values()) == pytest.approx(1.0)
    family = Counter()
    for fault in FAULTS:
        family[fault.family] += fault.share
    assert family == pytest.approx(
        {"intra-host hardware": 55.8, "intra-host software": 28.0, "network": 6.0, "other": 10.2}
    )
    settings = Settings(machines=2, seconds=60, metrics=("cpu_usage",))
    drawn = Counter(simulate(settings, seed).fault for seed in range(1000))
    for name, share in MIX.items():
        # Four standard deviations of a binomial count.
        assert abs(drawn[name] / 1000 - share) < 4 * np.sqrt(share / 1000), name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_moves_its_machine_and_drags_its_group(fault):
    """Against the same seed with an invisible fault: all draws but its size are the same."""
    made = {
        d: simulate(
            Settings(
                machines=24,
                seconds=600,
                metrics=tuple(METRICS),
                fault=fault.name,
                difficulty=d,
                missing=0,
                outages=0,
            ),
            9,
        )
        for d in (1.0, 1e6)
    }
    seen = made[1.0]
    capacity = np.array([METRICS[name].capacity for name in METRICS])[:, None]
    change = (seen.fleet.values - made[1e6].fleet.values) / capacity
    begin, end = (int(t - seen.fleet.start) for t in (seen.start, seen.end))
    assert np.abs(change[:, :, :begin]).max() < 1e-6
    inside = np.abs(change[:, :, begin + 30 : end].mean(2))
    row = seen.fleet.machines.index(seen.machine)
    shown = [seen.fleet.metrics.index(name) for name in seen.shown]
    hidden = [i for i in range(len(METRICS)) if i not in shown]
    assert shown
    assert inside[:, hidden].max(initial=0) < 1e-5
    others = np.arange(24) != row
    mates = (seen.job.pipeline == seen.job.pipeline[row]) & others
    strangers = others & ~mates
    strongest = shown[int(inside[row, shown].argmax())]
    assert inside[row, strongest] > 0.02
    assert inside[row, strongest] > 1.2 * inside[others, strongest].max()
    # Values are clipped to what a sensor can show, which takes from the change: hence "at least".
    assert inside[strangers, strongest].mean() > 0.5 * fault.fleet * inside[row, strongest]
    if mates.any() and fault.pipeline > fault.fleet:
        assert inside[mates, strongest].mean() > inside[strangers, strongest].mean()


def test_difficulty_divides_the_change():
    values = {
        d: simulate(
            Settings(
                machines=3,
                seconds=300,
                metrics=("cpu_usage",),
                fault="HDFS error",
                difficulty=d,
                missing=0,
                outages=0,
                disturbances=0,
            ),
            1,
        )
        for d in (1.0, 2.0, 1e6)
    }
    assert values[1.0].shown == ("cpu_usage",)
    base = values[1e6].fleet.values
    change = {d: np.abs(values[d].fleet.values - base).sum() for d in (1.0, 2.0)}
    assert change[1.0] == pytest.approx(2 * change[2.0], rel=0.05)  # clipping at 0 takes some


def test_machines_share_the_rhythm_of_the_job():
    job = make_job(6, 600, 0.3, np.random.default_rng(2))
    follow = np.corrcoef(job.computing)
    assert follow.min() > 0.35  # less where clocks are off by a quarter of a short step
    assert set(np.bincount(job.pipeline)[:-1]) <= {job.stage.max() + 1}
    assert 0.5 < job.computing.mean() < 0.95
    assert (job.busy < 1).any()


def test_clean_records_have_no_truth():
    clean = simulate(Settings(machines=4, seconds=60, faulty=False), 0)
    assert clean.machine is None
    assert clean.fault is None
    assert np.isnan(clean.start)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"machines": 1}, "machines=1 must be at least 2"),
        ({"seconds": 10}, "seconds=10 must be at least 60"),
        ({"metrics": ("heat",)}, "must name one or more of pfc_tx"),
        ({"metrics": ()}, "must name one or more"),
        ({"fault": "gremlins"}, "fault='gremlins' is unknown"),
        ({"difficulty": 0}, "difficulty=0 must be above 0"),
        ({"missing": 1.0}, r"missing=1.0 must lie in \[0, 0.99\]"),
        ({"outages": -0.1}, "outages=-0.1 must lie in"),
        ({"clock_skew": float("nan")}, "clock_skew=nan must be at least 0"),
    ],
)
def test_settings_say_what_is_wrong(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


def test_the_production_metrics_are_known():
    assert len(PRODUCTION) == 7
    assert set(PRODUCTION) <= set(METRICS)
