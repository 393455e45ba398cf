"""A server on a port of its own: how it ends, and what it follows."""

import asyncio
import json
import signal
import socket
import time

import pytest
from scripted import House, asking, until

from jrl.processes.stopping import Stop
from jrl.serving import server


def posting(body, length=None):
    """The bytes of a request."""
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length or len(body)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


async def connected(listening, content):
    """A client that has sent this and reads nothing by itself."""
    made = socket.socket()
    # So that little of an answer is on its way.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, listening.getsockname())
    await loop.sock_sendall(made, content)
    return made


def test_it_ends_though_clients_neither_send_nor_read(monkeypatch):
    """One sends one byte of a hundred, two do not take their answers, streamed and whole."""
    monkeypatch.setattr(server, "LAST_DELIVERY_SECONDS", 0.2)
    house, stop = House(slots=64, queue=64, most_bytes=2000), Stop()
    listening = server.listen("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # Some hundred thousand bytes, which neither the system nor the server takes at once.
    large = asking(n=64, max_tokens=30, logprobs=5)

    async def scene():
        serving = asyncio.create_task(
            server.serve(
                house.service, house.front, listening, stop, follow=False, max_connections=8
            )
        )
        begun = await connected(listening, posting(b"{", 100))
        clients = [
            await connected(listening, posting({**large, "stream": stream}))
            for stream in (True, False)
        ]
        ended = 'jrl_choices_total{finish="length"}'
        await until(lambda: house.numbers().get(ended) == 2 * 64)
        stop._receive(signal.SIGTERM, None)
        asked = time.monotonic()
        await asyncio.wait_for(serving, 10)
        took = time.monotonic() - asked
        answer = await asyncio.get_running_loop().sock_recv(begun, 4096)
        for each in (begun, *clients):
            each.close()
        return answer, took

    answer, took = asyncio.run(scene())
    assert house.service.ended and took < 5
    assert b" 503 " in answer.splitlines()[0] and b"server_ending" in answer
    requests = 'jrl_requests_total{endpoint="completions",status="%s"}'
    assert house.number(requests % "503") == house.number(requests % "gone") == 1
    assert house.number(requests % "200") == 1


def test_whatever_a_later_step_fails_by_is_one_line_and_it_is_followed_on(monkeypatch, capsys):
    monkeypatch.setattr(server, "FOLLOW_SECONDS", 0.01)
    house = House()
    versions, newest = house.versions, house.versions.newest

    def unreadable():
        raise RuntimeError("no such\nfolder")

    async def scene(client):
        following = asyncio.create_task(server._follow(house.service))
        versions.newest = unreadable
        said = []

        async def line(text):
            await until(lambda: said.append(capsys.readouterr().err) or text in "".join(said))

        await line("a later step is not served: RuntimeError: no such folder\n")
        versions.version, versions.error = 3, KeyError("a leaf")
        versions.newest = newest
        await line("step 3 is not served: KeyError: 'a leaf'\n")
        versions.version, versions.error = 4, None
        await line("serving step 4\n")
        following.cancel()
        return "".join(said)

    said = house.run(scene)
    assert said.count("\n") == 3, "a line for each"
    assert house.service.version == 4


@pytest.mark.parametrize(
    ("host", "private"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_what_other_machines_reach_is_known(host, private):
    with server.listen(host, 0) as listening:
        if private:
            server.check_private(host, listening)
            return
        with pytest.raises(ValueError, match=r"host=0\.0\.0\.0 can be reached by other machines"):
            server.check_private(host, listening)
