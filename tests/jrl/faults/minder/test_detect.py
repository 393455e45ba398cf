"""The detector on faults it must find and on records that must not alarm it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.faults.baselines import (
    Instant,
    four_moments,
    mahalanobis,
    raw,
    whitening,
    without_vae,
)
from benchmarks.faults.simulate import METRICS, PRODUCTION, Settings, simulate
from jrl.faults.__main__ import main as faults_main
from jrl.faults.collect.fleet import Fleet
from jrl.faults.minder import detect, train, vae
from jrl.faults.minder.detect import Minder, WindowScorer, divide_by_tokens
from jrl.faults.minder.embedding import View, gather, prepare
from jrl.faults.minder.train import Training, gather_windows, train_models, windows_by_model
from jrl.faults.watcher import DetectorOptions

QUICK = Minder(continuity=60.0, priority=("cpu_usage",))


def noisy(machines=6, seconds=150, seed=0, shifted=None, by=0.0):
    """One metric, CPU usage around 50, with a level shift of one machine from second 40."""
    values = 50 + 3 * np.random.default_rng(seed).normal(size=(machines, 1, seconds))
    if shifted is not None:
        values[shifted, 0, 40:] += by
    names = tuple(f"host-{i}" for i in range(machines))
    return Fleet(names, ("cpu_usage",), 5000.0, 1.0, values.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("by", [-20, 20])
def test_a_shift_is_found_where_and_when_it_is(by):
    (alarm,) = QUICK(noisy(shifted=4, by=by))
    assert (alarm.machine, alarm.metric) == ("host-4", "cpu_usage")
    # A tenth of the minute may lie outside (`share`), and a window is 8 s wide.
    assert alarm.start == pytest.approx(5040, abs=14)
    assert alarm.end == pytest.approx(5150, abs=14)
    assert alarm.evidence["score"] > alarm.evidence["threshold"]
    assert "host-4 stands out in cpu_usage since" in alarm.describe()


def test_nobody_is_named_in_health_or_for_a_short_shift():
    assert QUICK(noisy()) == []
    short = noisy(shifted=4, by=20)
    short.values[4, 0, 70:] = short.values[3, 0, 70:][::-1]
    assert QUICK(short) == []


def test_a_window_against_a_loop():
    """Raw windows: the farthest machine and its score, with no fast path."""
    prepared = prepare(noisy(seed=3), max_lag=0)
    scorer = WindowScorer(prepared, np.zeros(6, int), View("cpu_usage", (0,), raw))
    starts = np.array([0, 5, 141, 142])
    named = scorer.name_machines(starts, threshold=1.0)
    for start, machine in zip(starts, named, strict=True):
        window = prepared.values[0, :, start : start + 8]
        distance = np.linalg.norm(window[:, None] - window[None], axis=-1)
        sums = distance.sum(1)
        score = sums * 4 / (sums.sum() - 2 * sums)
        assert machine == score.argmax()
        assert scorer.scores[start] == pytest.approx(score.max(), rel=1e-4)


def test_windows_against_a_loop():
    values = np.random.default_rng(0).normal(size=(2, 3, 20)).astype(np.float32)
    windows = gather(values, np.array([0, 7, 12]))
    for w, start in enumerate((0, 7, 12)):
        np.testing.assert_array_equal(windows[:, w], values[:, :, start : start + 8])


def test_four_moments_against_their_definition():
    values = np.random.default_rng(0).beta(2.0, 5.0, size=(4, 90)).astype(np.float32)
    features = four_moments(values, 60)
    assert features.shape == (4, 4, 31)
    for machine, start in ((0, 0), (3, 17), (1, 30)):
        of = values[machine, start : start + 60].astype(float)
        centred = of - of.mean()
        expected = [of.mean(), of.std()]
        expected += [(centred**k).mean() / of.std() ** k for k in (3, 4)]
        np.testing.assert_allclose(features[:, machine, start], expected, rtol=1e-5)


def test_whitened_moments_give_mahalanobis_distances():
    """By the covariance of the usual half: a machine that is off moves neither axes nor sizes."""
    random = np.random.default_rng(0)
    mixing = random.normal(size=(3, 3))
    features = np.einsum("fg,gmw->fmw", mixing, random.normal(size=(3, 4, 500)))
    matrix = whitening(features, 1.0)
    rows = (features - np.median(features, 1, keepdims=True)).reshape(3, -1)
    far = np.square(rows / np.sqrt(np.square(rows).mean(1, keepdims=True))).sum(0)
    usual = rows[:, far <= np.median(far)]
    inverse = np.linalg.inv(usual @ usual.T / usual.shape[1])
    np.testing.assert_allclose(matrix.T @ matrix, inverse, rtol=1e-3, atol=1e-4)
    features[:, 1] += 100.0
    moved = whitening(features, 1.0)
    assert 0.3 < np.linalg.norm(moved) / np.linalg.norm(matrix) < 3
    few = whitening(features, 0.5)
    assert 0 < (np.abs(few).sum(1) > 0).sum() < 3


def test_the_baseline_sees_a_machine_of_a_small_fleet():
    """Fewer machines than features: whitened by themselves they would all be equally far."""
    fleet = simulate(Settings(machines=4, seconds=300, faulty=False, disturbances=0), 0).fleet
    fleet.values[2, :, 60:] *= 0.6
    (alarm,) = Minder(threshold=1.2, continuity=60.0, method=mahalanobis)(fleet)
    assert alarm.machine == fleet.machines[2]


def test_detectors_share_scores_of_a_fleet(monkeypatch):
    """Scores do not depend on the threshold: a second detector looks at new windows only."""
    fleet = noisy(shifted=4, by=20)
    strict, lax = replace(QUICK, threshold=1000.0), QUICK
    alone = strict.examine(fleet), lax.examine(fleet)
    record = QUICK.prepare_fleet(fleet)
    seen = []
    count = detect.farthest
    monkeypatch.setattr(detect, "farthest", lambda *a: seen.extend(a[1]) or count(*a))
    shared = strict.judge(record), lax.judge(record)
    assert len(seen) == len(set(seen)) > 0
    for one, other in zip(alone, shared, strict=True):
        assert one.alarms == other.alarms
        (seen_alone,), (seen_shared,) = one.traces.values(), other.traces.values()
        np.testing.assert_array_equal(seen_alone.leader, seen_shared.leader)
        np.testing.assert_array_equal(seen_alone.scores, seen_shared.scores)
    assert not shared[0].alarms
    assert shared[1].alarms
    instant = Instant(threshold=3.0)
    assert instant.judge(record).alarms == instant(fleet)


@pytest.mark.parametrize("method", [without_vae, mahalanobis])
def test_the_others_find_a_plain_fault_too(method):
    minder = Minder(threshold=1.2, continuity=60.0, method=method)
    (alarm,) = minder(noisy(shifted=2, by=30))
    assert alarm.machine == "host-2"
    (alarm,) = Instant(threshold=3.0)(noisy(shifted=2, by=30))
    assert alarm.machine == "host-2"


def test_roles_are_compared_among_themselves():
    """Two machines do twice the work by design; one of the others fails."""
    fleet = noisy(machines=8, seed=2)
    fleet.values[:3] += 30
    roles = ["expert-0"] * 3 + ["expert-1"] * 5
    split = replace(QUICK, roles=roles)
    assert split(fleet) == []
    fleet.values[6, 0, 40:] += 15
    assert [alarm.machine for alarm in split(fleet)] == ["host-6"]
    assert [alarm.machine for alarm in QUICK(fleet)] != ["host-6"]
    with pytest.raises(ValueError, match="roles has 1 labels for 8 machines"):
        replace(QUICK, roles=["a"])(fleet)


def test_metrics_are_compared_per_token():
    fleet = noisy(machines=5)
    tokens = np.ones((5, 150), np.float32)
    tokens[3] = 2.0
    fleet.values[3] *= 2
    assert [alarm.machine for alarm in QUICK(fleet)] == ["host-3"]
    fair = replace(QUICK, tokens=tokens, per_token=("cpu_usage",))
    assert fair(fleet) == []
    with pytest.raises(ValueError, match="tokens has shape"):
        divide_by_tokens(fleet, tokens[1:], ("cpu_usage",))
    with pytest.raises(ValueError, match="per_token names 'x'"):
        divide_by_tokens(fleet, tokens, ("x",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v[:2], "2 machines, at most 2 of one role"),
        (lambda v: v[:0], "0 machines"),
        (lambda v: v[:, :, :30], "the record holds 30 s, less than the 60 s"),
        (lambda v: v * 0 + 3, "is 3 everywhere"),
        (lambda v: v * np.float32(np.nan), "has no samples"),
    ],
)
def test_minder_notes_reasons_for_no_verdict(change, words):
    values = change(noisy(shifted=1, by=30).values)
    names = tuple(f"host-{i}" for i in range(len(values)))
    report = QUICK.examine(Fleet(names, ("cpu_usage",), 0.0, 1.0, values))
    assert report.alarms == []
    assert words in "\n".join(report.notes)


def test_a_machine_without_data_does_not_hide_another():
    fleet = noisy(shifted=1, by=30)
    fleet.values[0] = np.nan
    report = QUICK.examine(fleet)
    assert [alarm.machine for alarm in report.alarms] == ["host-1"]
    assert "'host-0' has no data" in report.notes[0]


def sick_and_bad(kind: str, seed: int) -> Fleet:
    """A record in which host-4 would be named, were it not for what is wrong with the record."""
    random = np.random.default_rng(seed)
    fleet = noisy(machines=5, seed=seed, shifted=4, by=20)
    values = fleet.values
    if kind == "no data from the sick one":
        values[4] = np.nan
    elif kind == "no data from the others":
        values[:4] = np.nan
    elif kind == "two machines":
        values[random.permutation(4)[:3]] = np.nan
    elif kind == "constant":
        values[:] = random.uniform(-5, 5)
    elif kind == "mostly holes":
        values[4, :, random.permutation(150)[:100]] = np.nan
    elif kind == "infinite":
        values[:] = np.inf
    return fleet


KINDS = (
    "no data from the sick one",
    "no data from the others",
    "two machines",
    "constant",
    "mostly holes",
    "infinite",
)


@pytest.mark.slow
@given(st.sampled_from(KINDS), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_bad_input_names_nobody_and_says_why(kind, seed):
    report = QUICK.examine(sick_and_bad(kind, seed))
    assert report.alarms == []
    assert report.notes, "nobody was told what is wrong with the record"
    assert [alarm.machine for alarm in QUICK(sick_and_bad("none", seed))] == ["host-4"]


@given(st.integers(0, 2**31), st.integers(3, 7), st.booleans())
@settings(max_examples=15, deadline=None)
def test_rubbish_alarms_nobody(seed, machines, spikes):
    """Machines that are alike in law, with holes, infinities and spikes."""
    random = np.random.default_rng(seed)
    fleet = noisy(machines=machines, seed=seed)
    values = fleet.values
    values[random.random(values.shape) < 0.1] = np.nan
    values[random.random(values.shape) < 0.01] = np.inf
    if spikes:
        values[random.integers(machines), 0, random.integers(150)] = 1e9
    assert replace(QUICK, continuity=120)(fleet) == []


@given(st.permutations(range(6)))
@settings(max_examples=8, deadline=None)
def test_the_order_of_machines_changes_nothing(order):
    fleet = noisy(shifted=4, by=20)
    mixed = Fleet(
        tuple(fleet.machines[i] for i in order),
        fleet.metrics,
        fleet.start,
        1.0,
        fleet.values[list(order)],
    )
    (alarm,), (expected,) = QUICK(mixed), QUICK(fleet)
    assert (alarm.machine, alarm.start, alarm.end) == (
        expected.machine,
        expected.start,
        expected.end,
    )


def test_every_metric_has_a_model_and_strangers_share_one():
    models = vae.shipped_models()
    assert set(models) == {*METRICS, vae.ANY, vae.JOINT}
    fleet = noisy(shifted=4, by=20)
    strange = Fleet(fleet.machines, ("queue/length",), fleet.start, 1.0, fleet.values)
    assert [alarm.machine for alarm in Minder(continuity=60.0)(strange)] == ["host-4"]


@pytest.mark.slow
def test_the_models_denoise():
    """Closer to the level behind the noise than the noisy window is."""
    random = np.random.default_rng(0)
    level = random.uniform(0.2, 0.8, size=(1, 1, 400))
    clean = np.broadcast_to(level, (8, 1, 400)).astype(np.float32)
    noisy_windows = clean + 0.08 * random.normal(size=clean.shape).astype(np.float32)
    for name in PRODUCTION:
        rebuilt = vae.reconstruct(vae.shipped_models()[name], jnp.asarray(noisy_windows))
        error = np.square(np.asarray(rebuilt) - clean).mean()
        assert error < 0.6 * 0.08**2, name


@pytest.mark.slow
def test_training_learns_and_repeats():
    fleets = [simulate(Settings(machines=4, seconds=60, metrics=PRODUCTION[:1], faulty=False), 1)]
    training = Training(windows=400, steps=20, batch=64)
    records = [one.fleet for one in fleets]
    models, early = train_models(records, training)
    again, _ = train_models(records, training)
    assert set(models) == {PRODUCTION[0], vae.ANY}
    for name, weights in models.items():
        for key, value in weights.items():
            np.testing.assert_array_equal(value, again[name][key])
    _, late = train_models(records, replace(training, steps=150))
    assert late[PRODUCTION[0]] < 0.6 * early[PRODUCTION[0]]


def test_models_of_records_have_the_names_that_are_looked_up(tmp_path):
    random = np.random.default_rng(0)
    names = ("gpu0/power", "gpu1/power", "jrl_cpu_process", "step/time")
    values = random.random((3, 4, 60), np.float32)
    record = Fleet(("a", "b", "c"), names, 0.0, 1.0, values)
    windows = windows_by_model([record], 40, random)
    assert list(windows) == ["gpu_power_draw", "cpu_usage", "step/time", vae.ANY]
    assert all(of_model.shape == (vae.WINDOW, 1, 40) for of_model in windows.values())
    models = dict.fromkeys(windows, vae.shipped_models()[vae.ANY])
    vae.save(tmp_path / "models.npz", models)
    again = vae.load(tmp_path / "models.npz")
    assert {name: set(weights) for name, weights in again.items()} == {
        name: set(weights) for name, weights in models.items()
    }
    fewer = replace(record, values=np.ones_like(values))
    with pytest.raises(ValueError, match="record 2 has no metric 'gpu0/power' that varies"):
        gather_windows([record, fewer], 40, random)


def test_training_on_records_leaves_the_models_of_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = vae.SHIPPED.read_bytes()
    noisy().save("record.npz")
    weights = vae.shipped_models()[vae.ANY]
    monkeypatch.setattr(
        train, "train_models", lambda *_, **__: ({vae.ANY: weights}, {vae.ANY: 0.01})
    )
    assert train.main(["record.npz"]) == 0
    assert vae.SHIPPED.read_bytes() == before
    assert capsys.readouterr().out.splitlines() == [
        "models.npz: 1 models, 4 KiB",
        "mean squared error: any metric 1.00e-02",
        "use them: python -m jrl.faults replay RECORD --detector minder --models models.npz",
    ]
    assert list(vae.load_models("models.npz")) == [vae.ANY]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("train", "records is empty: give files of healthy records, for example healthy.npz; "),
        ("train a.npz --seed -1", "seed=-1 must lie in 0..4294967295."),
        *(
            (name, f"command '{name}' simulates fleets, in a checkout: run python -m {new}.")
            for name in ("benchmark", "sliding", "simulate")
            for new in [f"benchmarks.faults {name}"]
        ),
    ],
)
def test_command_refuses_commands_of_simulated_fleets(command, error, capsys):
    assert faults_main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {error}")


def test_the_models_of_a_file_are_used(tmp_path):
    """Models without weights reconstruct all windows alike, so that no machine is an outlier."""
    path = tmp_path / "models.npz"
    vae.save(
        path,
        {vae.ANY: {name: 0 * weight for name, weight in vae.shipped_models()[vae.ANY].items()}},
    )
    shifted = noisy(shifted=4, by=20)
    for models, found in ((None, 1), (str(path), 0)):
        options = DetectorOptions(
            detector="minder", continuity=60.0, metrics=("cpu_usage",), models=models
        )
        assert len(options.make_detector()(shifted)) == found


def test_a_file_without_models_is_refused(tmp_path):
    path = tmp_path / "models.npz"
    noisy().save(path)
    with pytest.raises(ValueError, match="is not a file of denoising models, or is damaged: give"):
        vae.load_models(path)
    vae.save(path, {"cpu_usage": vae.shipped_models()[vae.ANY]})
    content = path.read_bytes()
    for damaged in (b"", b"text", content[: len(content) // 2], content):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a file of denoising models"):
            vae.load_models(path)


def test_saved_models_are_read_back(tmp_path):
    models = vae.shipped_models()
    vae.save(tmp_path / "models.npz", models)
    again = vae.load(tmp_path / "models.npz")
    np.testing.assert_array_equal(again[vae.ANY]["mean/bias"], models[vae.ANY]["mean/bias"])
    assert (tmp_path / "models.npz").stat().st_size < 300_000
