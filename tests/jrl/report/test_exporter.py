"""Endpoint of a run: what Prometheus reads, the health check, and the dashboard's queries."""

import json
import re
import socket
import urllib.error
import urllib.request

import pytest
from command_runs import FLAGS, metrics
from places import ROOT
from prometheus_client.parser import text_string_to_metric_families

from jrl import train
from jrl.processes.stopping import Supervisor
from jrl.report.exporter import RunExporter, exported_name
from jrl.report.metrics import TABLE

METRICS = {"critic/rewards/mean": 0.5, "perf/tokens_per_second": 1200, "faults/alarms": 0.0}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def exporter(clock):
    exporter = RunExporter(0, {"task": 'a "b"\\n', "recipe": "grpo"}, 9, deadline=60.0, clock=clock)
    yield exporter
    exporter.close()


def get(exporter, path):
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{exporter.port}{path}", timeout=10
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_last_step_is_served(exporter):
    exporter.log(1, METRICS)
    exporter.log(2, METRICS | {"critic/rewards/mean": 0.75})
    status, text = get(exporter, "/metrics")
    assert status == 200
    values = samples(text)
    assert values["jrl_run_step",] == 2 and values["jrl_run_steps",] == 9
    assert values["jrl_run_critic_rewards_mean",] == 0.75
    assert values["jrl_run_perf_tokens_per_second",] == 1200
    assert values["jrl_run_info", ("recipe", "grpo"), ("task", 'a "b"\\n')] == 1
    assert "# HELP jrl_run_critic_rewards_mean critic/rewards/mean: " in text


def test_before_the_first_step_there_is_no_step(exporter, clock):
    clock.now = 1e6  # compiling has no deadline
    values = samples(get(exporter, "/metrics")[1])
    assert ("jrl_run_step",) not in values and values["jrl_run_healthy",] == 1
    assert get(exporter, "/health") == (200, "starting\n")
    assert get(exporter, "/other")[0] == 404


def test_health_fails_once_a_step_exceeds_its_deadline(exporter, clock):
    exporter.log(3, METRICS)
    clock.now = 59.0
    assert get(exporter, "/health") == (200, "step 3 of 9, 59 s ago\n")
    clock.now = 61.0
    assert get(exporter, "/health") == (
        503,
        "step 4 has taken 61 s, more than step_deadline=60 s\n",
    )
    assert samples(get(exporter, "/metrics")[1])["jrl_run_healthy",] == 0
    exporter.log(4, METRICS)
    assert get(exporter, "/health")[0] == 200
    exporter.log(9, METRICS)
    clock.now = 1e6  # what comes after the last step is no step
    assert get(exporter, "/health")[0] == 200


def test_the_phase_is_served_and_a_hang_fails_the_health_check():
    status = ["reward", 3.5, None]
    exporter = RunExporter(0, {}, 9, phase=lambda: tuple(status))
    try:
        values = samples(get(exporter, "/metrics")[1])
        assert values["jrl_run_phase", ("phase", "reward")] == 1
        assert values["jrl_run_phase_seconds",] == 3.5 and values["jrl_run_healthy",] == 1
        status[2] = "process 0 (host a) has been in `reward` of step 4 for 301 s"
        assert get(exporter, "/health") == (503, f"{status[2]}\n")
        assert samples(get(exporter, "/metrics")[1])["jrl_run_healthy",] == 0
    finally:
        exporter.close()


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"metrics_port={port} on .*127.* is not available"):
            RunExporter(port, {}, 1)
    with pytest.raises(ValueError, match=r"metrics_address='192\.0\.2\.1' is not available"):
        RunExporter(0, {}, 1, address="192.0.2.1")


def test_only_this_machine_is_served_by_default(exporter):
    assert exporter._server.server_address[0] == "127.0.0.1"
    everywhere = RunExporter(0, {}, 1, address="0.0.0.0")
    try:
        assert everywhere._server.server_address[0] == "0.0.0.0"
        assert get(everywhere, "/health")[0] == 200
    finally:
        everywhere.close()


def test_names_of_metrics_stay_different():
    names = [metric.name for metric in TABLE if not metric.name.endswith("*")]
    assert len({exported_name(name) for name in names}) == len(names)


def test_the_dashboard_asks_for_metrics_that_exist(exporter):
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 10
    exporter.log(1, {})
    known = {name for name, *_ in samples(get(exporter, "/metrics")[1])}
    known |= {exported_name(metric.name) for metric in TABLE} | {"jrl_run_device_memory_bytes"}
    families = {exported_name(m.name)[:-1] for m in TABLE if m.name.endswith("/*")}
    for query in queries:
        names = re.findall(r"jrl_run_\w+", query)
        assert names, query
        for name in names:
            assert name in known or any(name.startswith(family) for family in families), name
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identities)) == len(identities)


@pytest.mark.slow
def test_a_run_serves_its_metrics_while_it_trains(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    read = []

    class Reading(Supervisor):
        def step_ended(self, step, metrics):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                read.append(samples(answer.read().decode()))
            return False

    flags = [*FLAGS, "--steps=2", f"--run-dir={tmp_path / 'run'}"]
    monitoring = [f"--metrics-port={port}", "--step-deadline=600"]
    assert train.main([*flags, *monitoring], Reading()) == 0
    assert [each["jrl_run_step",] for each in read] == [1, 2]
    lines = metrics(tmp_path / "run")
    for each, line in zip(read, lines[1:], strict=True):
        assert each["jrl_run_critic_rewards_mean",] == line["critic/rewards/mean"]
        [labels] = [dict(key[1:]) for key in each if key[0] == "jrl_run_info"]
        assert labels["run"] == "run" and labels["recipe"] == "grpo" and "jaxlib" in labels
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
