"""Connections that ask for nothing: dropped by time and by number, while others are served."""

import asyncio
import json
import os
import resource
from contextlib import asynccontextmanager

import pytest
from scripted import House, asking, until

from jrl.processes.stopping import Stop
from jrl.serving import server
from jrl.serving.server import RESERVED_FILES, limit_connections

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-"


def posting(body, *lines):
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(content)}",
        *lines,
    )
    return "\r\n".join([*head, "", ""]).encode() + content


@asynccontextmanager
async def serving(house, most):
    """A server, as a function that makes a client of what it sends first."""
    stop, made = Stop(), []
    with server.listen("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        given = house.service, house.front, listening, stop, False, most
        task = asyncio.create_task(server.serve(*given))

        async def client(content=b""):
            reader, writer = await asyncio.open_connection(*address)
            made.append(writer)
            writer.write(content)
            await writer.drain()
            return reader, writer

        try:
            yield client
        finally:
            house.engine.held = False
            for writer in made:
                writer.close()
            stop._receive(15, None)
            await asyncio.wait_for(task, 30)


def play(scene, house, most):
    async def run():
        async with serving(house, most) as client:
            return await scene(client)

    return asyncio.run(asyncio.wait_for(run(), 60))


async def status(reader):
    line = await asyncio.wait_for(reader.readline(), 30)
    return line.split()[1] if line else b""


async def is_closed(reader):
    """Waits until the server has closed it."""
    try:
        while await asyncio.wait_for(reader.read(100), 30):
            pass
    except ConnectionResetError:
        pass
    return True


def test_who_asks_is_heard_among_many_who_do_not():
    """Half heads, nothing at all and half bodies: the oldest make room, and files stay few."""
    most = 12

    async def scene(client):
        before = len(os.listdir("/dev/fd"))
        kinds = HALF, b"", posting(asking())[:-1]
        silent = [await client(kinds[n % 3]) for n in range(8 * most)]
        for _ in range(20):
            reader, _ = await client(HEALTH)
            assert await status(reader) == b"200"
        reader, _ = await client(posting(asking()))
        assert await status(reader) == b"200"
        # The first to come were the first to go.
        for reader, _ in silent[: 7 * most]:
            assert await is_closed(reader)
        # Of both ends: the clients' are all there still.
        held = len(os.listdir("/dev/fd")) - before - len(silent) - 21
        return held

    assert play(scene, House(), most) <= most + 1


def test_heads_that_do_not_come_to_their_end_are_dropped(monkeypatch):
    """Who sends a byte now and then is dropped as well, and who is being served is not."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.02)
    house = House()
    house.engine.held = True

    async def scene(client):
        served, _ = await client(posting(asking()))
        silent, _ = await client()
        slow, writer = await client(HALF)
        half_body, _ = await client(posting(asking())[:-1])

        async def trickle():
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert await is_closed(silent) and await is_closed(slow)
        trickling.cancel()
        # Bodies have a limit of their own.
        assert not half_body.at_eof()
        house.engine.held = False
        assert await status(served) == b"200"

    play(scene, house, 8)


def test_what_comes_after_an_answer_is_dropped_too(monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.02)
    house = House(api_key="k")

    async def scene(client):
        # Refused before its body was read, which never ends.
        reader, _ = await client(posting(asking())[:-1])
        assert await status(reader) == b"401"
        assert await is_closed(reader)
        # An answer that was taken: the next request has its time.
        again, writer = await client(HEALTH)
        assert await status(again) == b"200"
        await again.readuntil(b"}")
        await asyncio.sleep(1.3)
        writer.write(HEALTH)
        assert await status(again) == b"200"

    play(scene, house, 8)


def test_new_connections_are_refused_where_all_are_served():
    house = House(slots=2)
    house.engine.held = True

    async def scene(client):
        running = [(await client(posting(asking())))[0] for _ in range(2)]
        await until(lambda: house.number("jrl_slots_live") == 2)
        third, _ = await client(HEALTH)
        assert await status(third) == b"503"
        said = await third.read()
        assert b"Retry-After: 1" in said and said.endswith(server.FULL_MESSAGE)
        house.engine.held = False
        assert [await status(reader) for reader in running] == [b"200", b"200"]
        # Served, they may be closed for others.
        fourth, _ = await client(HEALTH)
        assert await status(fourth) == b"200"

    play(scene, house, 2)


@pytest.fixture
def files(monkeypatch):
    """Sets the limit of open files, of which there are ten."""

    def limited(limit):
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))

    monkeypatch.setattr(server.os, "listdir", lambda path: ["0"] * 10)
    return limited


def test_connections_have_room_among_open_files(files):
    files(10_000)
    assert limit_connections(None, 272) == (272 + server.EXTRA_CONNECTIONS, "")
    assert limit_connections(7, 272) == (7, "")
    files(200)
    number, why = limit_connections(None, 272)
    assert number == 200 - 10 - RESERVED_FILES
    assert why == (
        f"connections: {number}, as the limit of 200 open files (ulimit -n) does not allow 400"
    )
    with pytest.raises(ValueError, match=r"connections=127 and all else need more than the 200"):
        limit_connections(127, 272)
    assert limit_connections(126, 272) == (126, "")
    files(20)
    with pytest.raises(ValueError, match=r"a connection and all else need more .* ulimit -n"):
        limit_connections(None, 272)
    files(resource.RLIM_INFINITY)
    assert limit_connections(None, 272)[0] == 400
