"""How outcomes are counted, and a small run of the benchmark."""

import json
from dataclasses import replace

import pytest

from benchmarks.faults import benchmark
from benchmarks.faults.__main__ import main as faults_main
from benchmarks.faults.benchmark import BenchmarkOptions, main, run
from benchmarks.faults.outcomes import (
    false_alarm_rate,
    figures,
    map_in_processes,
    operational_precision,
    outcome,
)
from benchmarks.faults.simulate import Settings, simulate
from jrl.faults.collect.fleet import Alarm


def test_outcomes():
    incident = simulate(Settings(machines=4, seconds=300), 0)
    name, start, end = incident.machine, incident.start, incident.end
    other = next(machine for machine in incident.fleet.machines if machine != name)
    assert outcome(incident, []) == "silent"
    assert outcome(incident, [Alarm(name, "m", start, end)]) == "found"
    assert outcome(incident, [Alarm(other, "m", start, end)]) == "wrong"
    assert outcome(incident, [Alarm(name, "m", start - 20, start - 10)]) == "wrong"
    clean = simulate(Settings(machines=4, seconds=60, faulty=False), 0)
    assert outcome(clean, [Alarm("machine-0000", "m", 0, 1)]) == "wrong"


def test_figures_against_their_definition():
    found = figures(["found"] * 60 + ["wrong"] * 15 + ["silent"] * 25)
    assert found.precision[0] == pytest.approx(60 / 75)
    assert found.recall[0] == pytest.approx(0.6)
    assert found.f1[0] == pytest.approx(2 * 0.8 * 0.6 / 1.4)
    for value, low, high in (found.precision, found.recall, found.f1):
        # The normal interval of a share near 0.6 to 0.8 of 100 or 75 is 0.09 to 0.10 either way.
        assert 0.05 < value - low < 0.13
        assert 0.05 < high - value < 0.13
    assert figures(["silent"]).f1[0] == 0
    with pytest.raises(ValueError, match="outcomes is empty"):
        figures([])


def test_false_alarms_by_look_and_what_an_operator_sees_of_them():
    # Wilson's limits of none and of five in a hundred.
    assert false_alarm_rate(0, 100) == pytest.approx((0, 0, 0.0370), abs=1e-3)
    assert false_alarm_rate(5, 100) == pytest.approx((0.05, 0.0215, 0.1118), abs=1e-3)
    # Two faults a day, 1.6 found, 0.2 named wrongly, and one false alarm in 96 looks.
    precision = operational_precision(0.8, 0.1, 1 / 96, passes=96)
    assert precision == pytest.approx(1.6 / (1.6 + 0.2 + 1))
    assert operational_precision(0, 0, 0, passes=96) == 0


@pytest.mark.slow
def test_the_default_finds_what_others_do_not_and_alarms_nobody_in_health(tmp_path):
    """Harder faults than the published mix, rates with heavy tails, offsets, drifts."""
    request = BenchmarkOptions(
        incidents=12,
        clean=12,
        machines=20,
        difficulty=2.0,
        offsets=4.0,
        drifts=0.1,
        heavy_tails=True,
        only=("shift (default)", "robust z"),
        processes=1,
        out=str(tmp_path),
    )
    rows = run(request)["detectors"]
    shift, plain = rows["shift (default)"], rows["robust z"]
    assert shift["f1"][0] >= 0.9 and shift["f1"][0] > plain["f1"][0]
    assert shift["false_alarms"] == 0 and shift["operational_precision"] > 0.9


@pytest.mark.slow
def test_a_small_run_finds_most_and_alarms_little(tmp_path):
    """Conservative: the full benchmark's F1 is far above and a broken detector's near 0."""
    request = BenchmarkOptions(
        incidents=14, clean=4, machines=12, only=("Minder",), processes=1, out=str(tmp_path)
    )
    row = run(request)["detectors"]["Minder"]
    assert row["f1"][0] > 0.7
    assert row["counts"]["wrong"] <= 2
    assert row["false_alarms"] <= 1
    assert row["f1_by_machines"] == {"12 to 12": {"f1": row["f1"], "incidents": 14}}
    hard = replace(request, incidents=6, clean=0, difficulty=50.0, out=str(tmp_path / "hard"))
    assert run(hard)["detectors"]["Minder"]["f1"][0] < 0.4


@pytest.mark.slow
def test_a_run_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    request = BenchmarkOptions(
        incidents=2, clean=1, machines=4, seconds=300, only=("Minder",), out=str(tmp_path)
    )
    request = replace(request, processes=2)
    whole = run(request)
    records = tmp_path / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:-1]) + lines[-1][:9])
    looked = []
    look = benchmark._run_job
    monkeypatch.setattr(benchmark, "_run_job", lambda *a: looked.append(a[2]) or look(*a))
    again = run(replace(request, processes=1))
    # What was looked at by two processes is kept, the torn record looked at again, alike.
    assert [again[key] for key in ("detectors", "records")] == [
        whole[key] for key in ("detectors", "records")
    ]
    assert looked == [(benchmark.TEST_SEED + 1, True)]
    # Fewer records are a part of them, and more go on from there.
    assert run(replace(request, incidents=1, processes=1))["records"] == whole["records"][:2]
    assert len(looked) == 1
    with pytest.raises(ValueError, match="belongs to other settings"):
        run(replace(request, difficulty=2.0))


def test_jobs_keep_their_order_and_their_number_is_checked():
    assert list(map_in_processes(str, [3, 1, 2], 1)) == ["3", "1", "2"]
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        list(map_in_processes(str, [1], 0))


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    flags = "--incidents 3 --clean 1 --machines 5 --only Minder --only Mahalanobis --processes 1"
    flags = flags.replace("--only Minder --only Mahalanobis", "--only Minder Mahalanobis")
    assert main([*flags.split(), "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "benchmark.json").read_text())
    assert set(results["detectors"]) == {"Minder", "Mahalanobis"}
    assert len(results["records"]) == 4
    assert (tmp_path / "benchmark.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "Mahalanobis" in printed
    assert "0.777" in printed
    with pytest.raises(ValueError, match="only='Max' is unknown"):
        main(["--only", "Max", "--out", str(tmp_path / "max")])
    with pytest.raises(ValueError, match="incidents=0 must be at least 1"):
        main(["--incidents", "0", "--out", str(tmp_path)])


@pytest.mark.parametrize("command", ["benchmark", "simulate fleet.npz", "train --out models.npz"])
def test_a_seed_that_is_none_is_refused(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert faults_main([*command.split(), "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "error: seed=-1 must lie in 0..4294967295.\n"
    assert not list(tmp_path.iterdir())
