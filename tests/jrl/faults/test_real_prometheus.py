"""A Prometheus server from a package, asked by the watcher what exporters' pages said."""

import os
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
from exporters import HOSTS, METRICS, sample

from jrl.faults.__main__ import main

STEP, HISTORY, SLOW = 15, 1200, HOSTS[2]
PROGRAMS = [shutil.which(name) for name in ("prometheus", "promtool")]

pytestmark = [
    pytest.mark.slow,
    # Under the gate a missing server fails.
    pytest.mark.skipif(
        not all(PROGRAMS) and "JRL_GATE" not in os.environ, reason="no Prometheus is installed"
    ),
]


def pages(now):
    """Twenty minutes of what exporters of five hosts say, as OpenMetrics with times."""
    lines = []
    for name, (_, labels) in METRICS.items():
        # A counter has its ending in the samples alone.
        family, kind = name.removesuffix("_total"), "counter" if "_total" in name else "gauge"
        lines.append(f"# TYPE {family} {kind}")
        for host in HOSTS:
            pairs = {"instance": f"{host}:9400", **labels}.items()
            written = ",".join(f'{label}="{value}"' for label, value in pairs)
            for at in range(now - HISTORY, now, STEP):
                value = sample(name, host, at, SLOW, now - 420)
                lines.append(f"{name}{{{written}}} {value} {at}")
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture
def server(tmp_path):
    """The address of a server that has scraped them."""
    prometheus, promtool = PROGRAMS
    assert prometheus is not None and promtool is not None, "install Debian's prometheus"
    (tmp_path / "pages.txt").write_text(pages(int(time.time())))
    subprocess.run(
        [promtool, "tsdb", "create-blocks-from", "openmetrics", "pages.txt", "data"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    (tmp_path / "empty.yml").write_text("global: {scrape_interval: 15s}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            prometheus,
            "--config.file=empty.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def test_the_slow_machine_is_named(server, capsys):
    assert main(["watch", "--prometheus", server, "--once"]) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert f"ALARM: {SLOW} stands out in gpu0/" in output
    assert "15 series of 5 machines every 15 s" in output
