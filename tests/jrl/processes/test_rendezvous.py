"""Processes meet before JAX connects them; in threads, as nothing of it touches JAX."""

import socket
import threading
import time

import pytest

from jrl.processes import rendezvous

HOST = "127.0.0.1"


@pytest.fixture
def port():
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def meet(port, processes, seconds=20.0, count=2, host=HOST):
    """What process 0 and the others, as (count, index), said."""
    name, said = f"{host}:{port}", {}

    def run(key, call, *arguments):
        try:
            call((host, port), name, *arguments)
            said[key] = None
        except ValueError as error:
            said[key] = str(error)

    threads = [threading.Thread(target=run, args=(0, rendezvous.host, count, seconds))]
    for key, (own_count, index) in enumerate(processes, 1):
        arguments = (key, rendezvous.join, own_count, index, seconds)
        threads.append(threading.Thread(target=run, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return said


def connect(port):
    """A connection to process 0, once it listens."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((HOST, port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_all_go_on_when_all_are_there(port):
    assert meet(port, [(3, 1), (3, 2)], count=3) == {0: None, 1: None, 2: None}
    assert meet(port, [], count=1) == {0: None}  # the port is free again


@pytest.mark.parametrize(
    ("process", "line"),
    [
        (
            (3, 1),
            "process 1 was started with --num-processes 3, and process 0 with 2: give all the "
            "same.",
        ),
        ((2, 0), "two processes were started with --process-id 0: give each its own."),
    ],
)
def test_wrong_numbers_end_all_at_once(port, process, line):
    begun = time.monotonic()
    assert meet(port, [process]) == {0: line, 1: line}
    assert time.monotonic() - begun < 10


def test_a_doubled_process_ends_all(port):
    line = "two processes were started with --process-id 1: give each its own."
    assert set(meet(port, [(3, 1), (3, 1)], count=3).values()) == {line}


def test_those_that_do_not_come_are_named(port):
    said = meet(port, [], seconds=0.2, count=4)
    assert "not all of 4 processes connected within 0.2 s: missing is --process-id 1, 2" in said[0]


def test_a_process_that_ends_while_the_others_wait_is_named(port):
    def come_and_go():
        connection = connect(port)
        with connection:
            connection.sendall(b'{"jrl": 2, "count": 4}\n')
            time.sleep(0.2)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    said = meet(port, [(4, 1)], count=4, seconds=5.0)  # the last never comes
    thread.join()
    line = "process 2 has ended while the processes started: read its output."
    assert said[0] == line
    assert said[1] == line or "does not answer" in said[1]  # it may come too late to hear it


def test_rendezvous_ignores_other_connections(port):
    def scan():
        for content in (b"", b"GET / HTTP/1.0\r\n\r\n", b"[1]\n"):
            with connect(port) as connection:
                connection.sendall(content)

    thread = threading.Thread(target=scan)
    thread.start()
    said = {}

    def host():
        said[0] = rendezvous.host((HOST, port), "x", 2, 20.0)

    waiting = threading.Thread(target=host)
    waiting.start()
    thread.join()
    rendezvous.join((HOST, port), "x", 2, 1, 20.0)
    waiting.join(20)
    assert said == {0: None}


def test_an_address_of_another_machine_is_refused(port):
    """Of the block for documentation, which no machine has."""
    with pytest.raises(ValueError, match="process 0 does not reach itself there"):
        rendezvous.host(("192.0.2.1", port), f"192.0.2.1:{port}", 2, 20.0)


def test_an_address_that_answers_as_something_else_is_refused(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "REPLY_SECONDS", 0.1)
    with socket.create_server((HOST, 0)) as other:
        address = other.getsockname()
        create = socket.create_connection
        monkeypatch.setattr(
            rendezvous.socket, "create_connection", lambda _, timeout: create(address)
        )
        with pytest.raises(ValueError, match=r"itself there \(something else listens there\)"):
            rendezvous.host((HOST, port), "x", 2, 20.0)


def test_process_0_that_ends_is_named(port):
    with socket.create_server((HOST, port)) as server:

        def end():
            connection, _ = server.accept()
            connection.close()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(ValueError, match="process 0 has ended while the processes started"):
            rendezvous.join((HOST, port), "x", 2, 1, 20.0)
        thread.join()
