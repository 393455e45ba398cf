"""Watching exporters that are sick: each is named, and the others are seen meanwhile."""

import gzip
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from sick_exporters import METRIC, SICK, Exporters, keeps_silent, says

from jrl.faults import watch
from jrl.faults.__main__ import main
from jrl.faults.remote.fetch import Fetcher, Limits
from jrl.faults.remote.prometheus import Pages, Prometheus
from jrl.faults.standard import SILENCE, StandardDetector
from jrl.faults.watcher import RemoteWatcher

PATIENT = Limits(seconds=60)
"""Limits of a test in which nothing is late, on a slow machine either."""


@pytest.fixture
def exporters():
    each = Exporters()
    yield each
    each.close()


def healthy(name, **labels):
    written = ",".join(f'{key}="{value}"' for key, value in {"node": name, **labels}.items())
    return says(f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",{written}}} 95\n')


@pytest.fixture
def resolver(monkeypatch):
    """A resolver that does not know one name, and never answers about another."""
    ended, look_up = threading.Event(), socket.getaddrinfo

    def look(host, *rest, **settings):
        if host == "unknown.invalid":
            raise socket.gaierror(-2, "Name or service not known")
        if host == "lost.invalid":
            ended.wait()
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return look_up(host, *rest, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    yield
    ended.set()


SLOW = ("slow_body", "slow_headers", "slow_lines", "silent")


def check_watched(exporters, said, capsys, deadline):
    """`watch` says of each address what is expected, and sees four sound machines beside them."""
    sound = [exporters.serve(healthy(f"n{number}")) for number in range(4)]
    pages = [*sound[:2], *said, *sound[2:]]
    assert main(["watch", "--scrape", *pages, "--once", f"--deadline={deadline}"]) == 4
    output = "".join(capsys.readouterr().out.split())  # a narrow terminal breaks lines anywhere
    for address, line in said.items():
        _, found, rest = output.partition(address)
        assert found and "".join(line.split()) in rest[:200], (address, line)
    for number in range(4):
        assert f"n{number}│" in output and sound[number] not in output
    assert "Traceback" not in output


def test_watch_names_every_sick_exporter_and_sees_the_others(exporters, resolver, capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/metrics"
    said = {
        exporters.serve(answer): said for name, (answer, said) in SICK.items() if name not in SLOW
    }
    said |= {
        gone: "cannot be reached: [Errno",
        "http://unknown.invalid:9400/metrics": "cannot be reached: [Errno -2] Name or",
    }
    check_watched(exporters, said, capsys, deadline=60)


def test_watch_gives_up_slow_exporters_and_sees_the_others(exporters, resolver, capsys):
    late = "gave no whole answer in 3 s"
    said = {exporters.serve(SICK[name][0]): late for name in SLOW}
    check_watched(exporters, said | {"http://lost.invalid:9400/metrics": late}, capsys, deadline=3)


@pytest.mark.parametrize("name", ["cut", "endless_refusal", "not_http", "no_gzip", "circle"])
def test_a_sick_server_is_one_line(exporters, name):
    answer, said = SICK[name]
    look = RemoteWatcher(Prometheus(exporters.serve(answer), limits=PATIENT), StandardDetector())
    result = look.detect()
    assert said in result.unreadable[0] and result.alarms == () and not result.comparable


@pytest.mark.parametrize("drop", ["slow_body", "slow_headers", "silent"])
def test_a_slow_server_is_given_up_at_the_deadline(exporters, drop):
    server = Prometheus(exporters.serve(SICK[drop][0]), limits=Limits(seconds=0.2))
    assert "gave no whole answer in 0.2 s" in server.poll(0.0, 50.0)[1][0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<html></html>", "the answer is not JSON, or is truncated"),
        ('{"status":"success","data":{"resultType":"vector","result":[]}}', "is a vector, not a"),
        ('{"status":"success","data":{"resultType":"matrix","result":[{}]}}', "not as Prometheus"),
        (
            '{"status":"success","warnings":["store 3 timed out"],'
            '"data":{"resultType":"matrix","result":[]}}',
            "warns: ['store 3 timed out']",
        ),
    ],
)
def test_a_wrong_answer_of_a_server_is_said_with_its_address(exporters, content, said):
    address = exporters.serve(says(content)).removesuffix("/metrics")
    samples, (problem,) = Prometheus(address, limits=PATIENT).poll(0.0, 50.0)
    assert samples == [] and problem.startswith(address) and said in problem


def test_a_page_of_the_greatest_size_is_read_and_one_byte_more_is_not(exporters):
    address = exporters.serve(says(METRIC * 10))
    size = len(METRIC) * 10
    assert Fetcher(Limits(60, size)).fetch([address]) == [METRIC.encode() * 10]
    (line,) = Fetcher(Limits(60, size - 1)).fetch([address])
    assert "answers with more than" in line


def test_a_redirect_on_one_host_and_gzip_are_read(exporters):
    packed = exporters.serve(says(gzip.compress(METRIC.encode()), "Content-Encoding: gzip"))
    moved = exporters.serve(says("", f"Location: {packed}", status="301 Moved"))
    assert Fetcher(PATIENT).fetch([packed, moved]) == [METRIC.encode()] * 2


def test_an_address_that_hangs_is_not_asked_again_meanwhile(resolver):
    fetcher = Fetcher(Limits(seconds=0.05))
    before = threading.active_count()
    for _ in range(5):
        (line,) = fetcher.fetch(["http://lost.invalid/metrics"])
        assert "no whole answer" in line
    assert threading.active_count() <= before + 1


def test_a_given_up_connection_is_closed(exporters):
    fetcher = Fetcher(Limits(seconds=0.2))
    address = exporters.serve(keeps_silent)
    fetcher.fetch([address])
    (thread,) = fetcher._unended.values() or [None]
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


def test_the_watch_goes_on_and_says_when_a_page_answers_again(exporters, monkeypatch, capsys):
    broken = threading.Event()
    broken.set()

    def sometimes(connection, stopped):
        (SICK["cut"][0] if broken.is_set() else healthy("n3"))(connection, stopped)

    pages = [exporters.serve(healthy(f"n{number}")) for number in range(3)]
    pages.append(exporters.serve(sometimes))
    looks = []

    def pause(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            broken.clear()
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=pause))
    with pytest.raises(KeyboardInterrupt):
        watch.main(["--scrape", *pages, "--deadline=60"])
    lines = capsys.readouterr().out.splitlines()
    (cut,) = (line for line in lines if line.startswith(pages[3]))
    assert lines.index(cut) < lines.index("n3: running") < lines.index(f"over: {cut}")


def test_a_machine_that_never_answers_is_an_alarm_while_others_answer(exporters):
    pages = [exporters.serve(healthy(f"n{number}")) for number in range(3)]
    sick = exporters.serve(SICK["cut"][0]).replace("127.0.0.1", "localhost")
    look = RemoteWatcher(Pages([*pages, sick], PATIENT), StandardDetector())
    for now in np.arange(1e9, 1e9 + 240, 15.0).tolist():
        result = look.detect(now)
        assert result.alarms == () and sick in result.unreadable[0]
        assert {each.machine: each.state for each in result.processes}["localhost"] == "no answer"
    (alarm,) = look.detect(1e9 + 240).raised
    assert (alarm.machine, alarm.metric, alarm.start) == ("localhost", SILENCE, 1e9)
    # Where nobody answers, the watch itself is cut off.
    alone = RemoteWatcher(Pages([sick], PATIENT), StandardDetector())
    assert [alone.detect(now).alarms for now in (1e9, 1e9 + 900)] == [(), ()]


@pytest.mark.parametrize(
    "page",
    [
        "".join(f"own_{number} 1\n" for number in range(3000)),
        "".join(f'DCGM_FI_DEV_GPU_UTIL{{gpu="{number}"}} 1\n' for number in range(3000)),
    ],
    ids=["names", "gpus"],
)
def test_more_metrics_than_fit_are_left_out_and_the_others_are_compared(
    exporters, monkeypatch, page
):
    monkeypatch.setattr("jrl.faults.remote.exporters.MAX_VALUES", 1000)
    pages = [exporters.serve(healthy(f"n{number}")) for number in range(4)]
    look = RemoteWatcher(Pages([*pages, exporters.serve(says(page))], PATIENT), StandardDetector())
    result = look.detect(1e9)
    assert set(result.fleet.machines) >= {"n0", "n1", "n2", "n3"}
    assert "gpu0/duty_cycle" in result.fleet.metrics and len(result.fleet.metrics) == 1
    assert any("metrics of fewer than half of the machines are left" in n for n in result.notes)


def test_a_page_without_the_label_that_names_machines_is_said(exporters):
    pages = [exporters.serve(healthy(f"n{number}", rack=f"r{number}")) for number in range(3)]
    pages.append(exporters.serve(healthy("n3")))
    look = RemoteWatcher(Pages(pages, PATIENT), StandardDetector(), label="rack")
    result = look.detect(1e9)
    assert result.fleet.machines == ("r0", "r1", "r2")
    assert any("no label 'rack'" in note and "Left out" in note for note in result.notes)


@pytest.mark.parametrize("name", ["a\\nb", "a\0b", "$(touch x)", "x" * 60_000, "é", "[b]", ""])
def test_any_name_of_a_machine_is_shown(exporters, capsys, name):
    page = exporters.serve(healthy(name))
    assert main(["watch", "--scrape", page, "--once", "--deadline=60"]) == 4
    output = capsys.readouterr().out
    assert "\0" not in output and "1 processes" in output and "running" in output
