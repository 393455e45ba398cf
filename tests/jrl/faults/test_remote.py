"""Watching over the network: a server that answers Prometheus's query API, and exporters' pages."""

import json
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
from exporters import HOSTS, METRICS, sample

from jrl.faults.__main__ import main
from jrl.faults.remote.prometheus import Pages, Prometheus, Store
from jrl.faults.standard import StandardDetector
from jrl.faults.watcher import RemoteWatcher


class Answers(BaseHTTPRequestHandler):
    """``/api/v1/query`` with a range of a selector, as Prometheus 2 answers it."""

    queries: ClassVar[list[dict]] = []
    slow: str | None = None
    step = 15

    def do_GET(self):
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        self.queries.append(query)
        seconds = int(re.search(r"\[(\d+)s\]$", query["query"][0])[1])
        end = float(query["time"][0])
        times = np.arange(np.ceil((end - seconds) / self.step), end // self.step + 1) * self.step
        result = [
            {
                "metric": {"__name__": name, "instance": f"{host}:9400", **labels},
                "values": [
                    [t, str(sample(name, host, t, self.slow, end - 420))] for t in times.tolist()
                ],
            }
            for name, (_, labels) in METRICS.items()
            for host in HOSTS
        ]
        self.answer(
            json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})
        )

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *rest):
        pass


@pytest.fixture
def server():
    """Makes a server that answers as a class says, and gives its address."""
    opened = []

    def serve(handler):
        one = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
        opened.append(one)
        return f"http://127.0.0.1:{one.server_port}"

    yield serve
    for one in opened:
        one.shutdown()
        one.server_close()


def test_a_prometheus_server_is_asked_and_the_slow_machine_named(server, capsys, tmp_path):
    class Slow(Answers):
        queries: ClassVar[list[dict]] = []
        slow = HOSTS[2]

    address = server(Slow)
    assert main(["watch", "--prometheus", address, "--once"]) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert f"ALARM: {HOSTS[2]} stands out in gpu0/" in output
    assert "15 series of 5 machines every 15 s" in output
    known = tmp_path / "known"
    known.write_text(f"{HOSTS[2]}\n")
    assert main(["watch", "--prometheus", address, "--once", "--acknowledged", str(known)]) == 0


def test_remote_watcher_names_no_healthy_machine_and_asks_for_new_samples(server):
    class Healthy(Answers):
        queries: ClassVar[list[dict]] = []

    watcher = RemoteWatcher(Prometheus(server(Healthy)), StandardDetector())
    now = time.time()
    first, second = watcher.detect(now), watcher.detect(now + 15)
    assert first.alarms == second.alarms == () and second.comparable
    assert first.fleet.metrics == ("gpu0/duty_cycle", "gpu0/power", "network/in")
    assert second.fleet.num_samples >= 60
    asked = [int(re.search(r"\[(\d+)s\]", each["query"][0])[1]) for each in Healthy.queries]
    assert asked[0] > 900 and asked[1] < 120


def test_watch_unreachable_server_gives_no_all_clear(server, capsys):
    assert main(["watch", "--prometheus", "http://127.0.0.1:9", "--once"]) == 4
    output = " ".join(capsys.readouterr().out.split())
    assert "cannot be reached" in output and "no machine is watched" in output
    assert "no process stands out" not in output and "between two" not in output
    assert main(["watch", "--prometheus", "localhost:9090", "--once"]) == 2
    assert main(["watch", "run", "--prometheus", "http://x", "--once"]) == 2


def test_exporters_pages_are_fetched_and_a_dead_one_is_said(server):
    class Page(Answers):
        def do_GET(self):
            self.answer('DCGM_FI_DEV_GPU_UTIL{gpu="0"} 95\nnode_network_receive_bytes_total 7\n')

    good = server(Page) + "/metrics"
    source = Pages([good, "http://127.0.0.1:9/metrics"])
    samples, (problem,) = source.poll(0.0, 50.0)
    assert [(labels["__name__"], at, value) for labels, at, value in samples] == [
        ("DCGM_FI_DEV_GPU_UTIL", 50.0, 95.0),
        ("node_network_receive_bytes_total", 50.0, 7.0),
        ("up", 50.0, 1.0),
        ("up", 50.0, 0.0),
    ]
    assert samples[0][0]["instance"].startswith("127.0.0.1:")
    assert "http://127.0.0.1:9/metrics cannot be reached" in problem


def test_pages_need_an_address():
    with pytest.raises(ValueError, match=r"scrape=\(\) must have a page's address"):
        Pages(())


def test_samples_of_a_clock_that_is_ahead_are_left_out_and_do_not_stop_the_asking():
    asked = []

    class Clocks:
        def poll(self, since, now):
            asked.append(since)
            labels = {"__name__": "jrl_step_time", "instance": "n7:9400"}
            return [(labels, now, 1.0), (labels, now + 3e7, 2.0)], []

    store = Store(Clocks(), 900)
    for now in (1000.0, 1015.0):
        (series,), (problem,) = store.update(now)
        assert series.times[-1] == now and series.values.max() == 1
    assert asked == [100.0, 1000.0]
    assert "samples are more than 60 s ahead" in problem and "jrl_step_time of 'n7'" in problem


def test_pages_compare_known_and_requested_metrics_only(server):
    class Page(Answers):
        def do_GET(self):
            self.answer('DCGM_FI_DEV_GPU_UTIL{gpu="0"} 95\nnode_boot_time_seconds 7\nqueue 1\n')

    address = server(Page) + "/metrics"
    look = RemoteWatcher(Pages([address]), StandardDetector()).detect()
    assert look.fleet.metrics == ("gpu0/duty_cycle", "queue")
    assert "not compared: node_boot_time_seconds (--metrics NAME" in look.notes[0]
    wanted = RemoteWatcher(
        Pages([address]), StandardDetector(), requested=("node_boot_time_seconds",)
    ).detect()
    assert wanted.fleet.metrics == ("gpu0/duty_cycle", "node_boot_time_seconds", "queue")


@pytest.mark.parametrize("seconds", [300, 900])
def test_a_total_that_reads_0_once_names_nobody_in_any_look(seconds):
    """Nor when the readings before it have left the record."""

    class Errors:
        def poll(self, since, now):
            del since
            labels = {"__name__": "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "gpu": "0"}
            return [
                ({**labels, "instance": f"n{i}:9400"}, now, 0.0 if (i, now) == (3, 1300) else 3.0)
                for i in range(5)
            ], []

    watcher = RemoteWatcher(Errors(), StandardDetector(), seconds=seconds)
    for now in range(1000, 2800, 15):
        assert watcher.detect(float(now)).alarms == ()
