"""Server beside a training: connections that send little or nothing keep nobody out."""

import socket
import threading
import time
import urllib.request
from contextlib import suppress
from http import HTTPStatus

import pytest

from jrl.processes.limited_server import LimitedServer

HOST = "127.0.0.1"


@pytest.fixture
def serve():
    servers = []

    def start(answer=lambda path: (HTTPStatus.OK, path.encode(), "text/plain"), **limits):
        servers.append(LimitedServer((HOST, 0), answer, **limits))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def connect(server, sent=b""):
    connection = socket.create_connection((HOST, server.server_port), timeout=60)
    connection.sendall(sent)
    return connection


def fetch(server, path="/metrics"):
    address = f"http://{HOST}:{server.server_port}{path}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HT", b"GET / HTTP/1.1\r\nX: y\r\n"])
def test_half_open_connections_keep_nobody_out(serve, sent):
    server = serve(max_connections=4, seconds=3600)
    threads = threading.active_count()
    idle = [connect(server, sent) for _ in range(40)]
    assert fetch(server) == b"/metrics"
    # The oldest are closed, of whose threads some may still be ending.
    assert server.num_connections <= 4
    for each in idle[:36]:
        assert each.recv(1) == b""
    for each in idle:
        each.close()
    assert threading.active_count() <= threads + 40


def test_a_connection_is_closed_at_its_deadline_though_it_sends(serve):
    server = serve(seconds=0.2)
    with connect(server, b"GET /") as connection, suppress(ConnectionError):
        connection.settimeout(0.05)
        while True:  # until the server closes it
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if connection.recv(1) == b"":
                    break
    assert server.num_connections == 0


def test_an_answer_that_nobody_reads_is_ended(serve):
    server = serve(lambda path: (HTTPStatus.OK, bytes(2**26), "text/plain"), seconds=0.3)
    with connect(server, b"GET / HTTP/1.1\r\n\r\n") as connection:
        assert connection.recv(1) == b"H"
        while server.num_connections:
            time.sleep(0.01)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\0\n", b"POST / HTTP/1.1\r\n\r\n", b"x" * 70_000 + b"\n"]
)
def test_other_bytes_than_a_request_are_refused(serve, sent, capsys):
    server = serve()
    with connect(server, sent) as connection:
        answer = connection.recv(2**16)
    assert answer and b"200 OK" not in answer
    assert fetch(server, "/health?x=1") == b"/health"
    assert capsys.readouterr().err == ""
