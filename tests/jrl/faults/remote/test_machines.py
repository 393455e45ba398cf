"""Several names of one machine: which exporters are of the same one, and what it is called."""

import numpy as np
import pytest

from jrl.faults.remote.exporters import build_fleet, sort_series
from jrl.faults.remote.series import Series
from jrl.faults.standard import StandardDetector

TICKS, PERIOD = 64, 15.0
TIMES = 1.8e9 + PERIOD * np.arange(TICKS)
RANDOM = np.random.default_rng(0)


def series(name, level=1.0, ticks=slice(None), **labels):
    values = level * RANDOM.normal(1, 0.02, TICKS)
    if name.endswith("_total"):
        values = np.cumsum(values)
    return Series({"__name__": name, **labels}, TIMES[ticks], values[ticks])


def dcgm(number, gpu="0", **labels):
    pod = {"pod": f"dcgm-exporter-x{number}", "namespace": "gpu-operator", "job": "dcgm"}
    return series(
        "DCGM_FI_DEV_GPU_UTIL",
        90,
        **{"gpu": gpu, "UUID": f"GPU-{number}", "instance": f"10.244.{number}.7:9400", **pod},
        **labels,
    )


def node(number, **labels):
    pod = {"pod": f"node-exporter-{number}", "job": "node-exporter", "device": "eth0"}
    return series(
        "node_network_receive_bytes_total",
        instance=f"192.168.0.{number}:9100",
        **pod,
        **labels,
    )


def cadvisor(number, **labels):
    return series(
        "container_cpu_usage_seconds_total",
        id="/",
        instance=f"192.168.0.{number}:10250",
        job="kubelet",
        **labels,
    )


def names(number):
    return f"gpu-node-{number}"


def uname(number, nodename):
    labels = {**node(number).labels, "__name__": "node_uname_info"}
    return Series({**labels, "machine": "x86_64", "nodename": nodename}, TIMES, np.ones(TICKS))


def restarted(each, instance):
    """A series whose exporter has another address from the thirtieth sample on."""
    later = Series({**each.labels, "instance": instance}, each.times[30:], each.values[30:])
    return Series(each.labels, each.times[:30], each.values[:30]), later


CLUSTERS = {
    "kubernetes": lambda n: [
        dcgm(n, Hostname=names(n)),
        node(n, nodename=names(n)),
        cadvisor(n, node=names(n)),
    ],
    "node_exporter_without_a_name": lambda n: [
        dcgm(n, Hostname=names(n)),
        node(n),
        cadvisor(n, node=names(n)),
    ],
    "node_exporter_says_its_name": lambda n: [
        dcgm(n, Hostname=names(n)),
        node(n),
        uname(n, names(n)),
    ],
    "with_a_domain": lambda n: [
        dcgm(n, Hostname=f"{names(n)}.cluster.example"),
        node(n, nodename=names(n).upper()),
        cadvisor(n, node=names(n)),
    ],
    "by_name": lambda n: [
        dcgm(n, Hostname=names(n)),
        series("node_memory_MemAvailable_bytes", instance=f"{names(n)}:9100"),
    ],
    "two_pods_with_a_gpu_each": lambda n: [
        dcgm(n, Hostname=names(n)),
        dcgm(n + 100, "1", Hostname=names(n)),
        cadvisor(n, node=names(n)),
    ],
    "one_exporter_restarted": lambda n: [
        *restarted(dcgm(n, Hostname=names(n)), f"10.244.{n}.8:9400"),
        cadvisor(n, node=names(n)),
    ],
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_exporters_that_share_a_name_are_one_machine_called_by_its_node(cluster):
    parts = [each for number in range(8) for each in CLUSTERS[cluster](number)]
    found = sort_series(parts)
    assert {each.lower() for each in found.machines} == {names(number) for number in range(8)}
    assert found.notes == []
    # In any order of the series.
    assert set(sort_series(parts[::-1]).machines) == set(found.machines)


def test_a_slow_gpu_and_a_slow_network_are_of_one_machine():
    parts = [each for number in range(8) for each in CLUSTERS["kubernetes"](number)]
    slow = parts[3 * 5]
    slow.values[34:] *= 0.7
    fleet = build_fleet(parts)
    assert len(fleet.machines) == 8 and len(fleet.metrics) == 3
    assert [alarm.machine for alarm in StandardDetector()(fleet)] == ["gpu-node-5"]


@pytest.mark.parametrize(
    "parts",
    [
        lambda n: [dcgm(n), node(n)],
        lambda n: [dcgm(n, Hostname=f"dcgm-exporter-x{n}"), cadvisor(n, node=names(n))],
        lambda n: [dcgm(n, Hostname="localhost"), node(n, nodename="localhost")],
        lambda n: [dcgm(n, Hostname="image"), node(n, nodename="image")],
    ],
    ids=["no_name", "name_of_the_pod", "localhost", "name_of_the_image"],
)
def test_exporters_whose_names_cannot_be_joined_are_said(parts):
    found = sort_series([each for number in range(4) for each in parts(number)])
    assert len(set(found.machines)) == 8
    (note,) = found.notes
    assert note.startswith("metrics DCGM_* and ") and "are of other machines (10.244.0.7, " in note
    assert "... 4 in all" in note and "a label node" in note


def test_machines_without_gpus_are_no_reason_for_a_note():
    parts = [each for number in range(4) for each in CLUSTERS["kubernetes"](number)]
    parts += [each for number in range(4, 6) for each in CLUSTERS["kubernetes"](number)[1:]]
    assert sort_series(parts).notes == []


@pytest.mark.parametrize(
    "labels",
    [
        [{"node": "a", "instance": "gw:9100"}, {"node": "b", "instance": "gw:9100"}],
        [{"machine": "h-0", "instance": "h:1"}, {"machine": "h-1", "instance": "h:2"}],
        [{"node": "a", "instance": "localhost:1"}, {"node": "b", "instance": "localhost:1"}],
        [{"instance": "a:1", "Hostname": "x"}, {"instance": "b:1", "Hostname": "x"}],
        [{"instance": "a:1", "nodename": "x"}, {"instance": "b:1", "nodename": "x"}],
        [{"instance": "n.rack1:1"}, {"instance": "n.rack2:1"}],
        [{"node": "n.rack1"}, {"node": "n.rack2"}],
    ],
)
def test_machines_that_share_a_name_by_accident_stay_two(labels):
    parts = [series("node_memory_MemAvailable_bytes", **each) for each in labels]
    assert len(set(sort_series(parts).machines)) == 2


def test_an_exporter_that_does_not_answer_its_server_is_said():
    def up(number, values, job="dcgm"):
        labels = {"__name__": "up", "instance": f"10.244.{number}.7:9400", "job": job}
        return Series(labels, TIMES, np.broadcast_to(np.asarray(values, float), TICKS))

    lost = np.where(np.arange(TICKS) < 20, 1, 0)
    found = sort_series(
        [
            *(dcgm(number) for number in range(4)),
            *(up(number, 1) for number in range(4)),
            *(up(4, 0), up(5, lost), up(6, 1 - lost), up(7, 0, job="unrelated")),
        ]
    )
    assert found.unanswered == {"10.244.4.7": TIMES[0], "10.244.5.7": TIMES[20]}
    (note,) = found.notes
    assert note == "exporters do not answer their server: 10.244.4.7:9400, 10.244.5.7:9400"
