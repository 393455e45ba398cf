"""Every message arrives at its target, by any method, and nothing else is sent."""

import json
import re
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.disaggregated import m2n
from moe.disaggregated.layer import decode_message, encode_message, message_width
from moe.disaggregated.m2n import (
    Message,
    _permute_program,
    make_exchange,
    reachable_host,
    row_sharding,
)
from moe.disaggregated.split import Split, fold_split


def sides(sources, targets):
    split = Split(f"dp{sources}", f"ep{targets}")
    return fold_split(split, jax.devices()[: sources + targets])


@pytest.mark.parametrize("name", ["device_put", "collective", "transfer"])
@pytest.mark.parametrize(("sources", "targets"), [(2, 3), (3, 2), (1, 1)])
def test_messages_arrive(name, sources, targets):
    mesh, message = sides(sources, targets), Message(2, 5, jnp.dtype("uint32"))
    draw = np.random.default_rng(0)
    sent = draw.integers(0, 2**32, (sources, targets, 2, 5), np.uint32)
    place = row_sharding(mesh.attention)
    parts = tuple(jax.device_put(sent[:, j].reshape(-1, 5), place) for j in range(targets))
    came = make_exchange(name, mesh.attention, mesh.experts)(parts, message)
    assert len(came) == sources
    for i, array in enumerate(came):
        assert array.sharding == row_sharding(mesh.experts)
        np.testing.assert_array_equal(np.asarray(array).reshape(targets, 2, 5), sent[i])


@pytest.mark.parametrize("name", ["device_put", "collective", "transfer"])
def test_arrays_are_assembled_of_the_buffers_that_are_there(name, monkeypatch):
    mesh, assembled, numbers = sides(2, 3), m2n._assemble, []

    def pointers(arrays):
        return [array.unsafe_buffer_pointer() for array in arrays]

    def watched(shards, number, sharding):
        array = assembled(shards, number, sharding)
        held = m2n._shards(array)
        assert pointers(held[device] for shard in shards for device in shard.devices()) == (
            pointers(shards)
        )
        numbers.extend(pointers(shards))
        return array

    monkeypatch.setattr(m2n, "_assemble", watched)
    place = row_sharding(mesh.attention)
    parts = tuple(jax.device_put(np.full((4, 5), j, np.uint32), place) for j in range(3))
    given = pointers(part.addressable_data(i) for part in parts for i in range(2))
    came = make_exchange(name, mesh.attention, mesh.experts)(
        parts, Message(2, 5, jnp.dtype("uint32"))
    )
    # What came is what programs get, and a collective gets what is sent.
    assert {*pointers(x.addressable_data(j) for x in came for j in range(3))} <= {*numbers}
    assert ({*given} <= {*numbers}) == (name == "collective")


def test_a_message_goes_out_once_and_its_bytes_are_those_of_the_formula():
    """The permutations name each pair of devices once, and a message is what each of them sends."""
    mesh, message = sides(2, 3), Message(4, 5, jnp.dtype("uint32"))
    exchange = make_exchange("collective", mesh.attention, mesh.experts)
    union = exchange._union
    shape = jax.ShapeDtypeStruct((5 * 4, 5), jnp.uint32, sharding=union)
    after = jax.ShapeDtypeStruct((5, 1), jnp.int32, sharding=union)
    text = _permute_program(union, 2, 3).lower(*[shape] * 3, after).as_text()
    found = re.findall(
        r"collective_permute.*?source_target_pairs = dense<(\[\[.*?\]\])>.*?-> tensor<(\w+)>", text
    )
    pairs = [tuple(pair) for listed, _ in found for pair in json.loads(listed)]
    assert sorted(pairs) == [(i, 2 + j) for i in range(2) for j in range(3)]
    assert {shape for _, shape in found} == {"4x5xui32"}
    assert message.num_bytes == 4 * 5 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_message_round_trip(dtype):
    draw, k = np.random.default_rng(0), 3
    rows = jnp.asarray(draw.normal(size=(4, 6)), dtype)
    slots = jnp.asarray(draw.integers(0, 70000, (4, k)), jnp.int32)
    probs = jnp.asarray(draw.uniform(size=(4, k)), jnp.float32)
    message = encode_message(rows, slots, probs)
    assert message.shape == (4, message_width(6, k, dtype))
    for found, given in zip(
        decode_message(message, 6, k, dtype), (rows, slots, probs), strict=True
    ):
        assert found.dtype == given.dtype
        np.testing.assert_array_equal(found.astype(jnp.float32), given.astype(jnp.float32))


@pytest.mark.slow
def test_a_message_that_does_not_come_is_not_waited_for_without_end(monkeypatch, caplog):
    """One that is late is, and what came before it is kept."""
    monkeypatch.setattr(m2n, "TIMEOUT_SECONDS", 1.0)
    office, message, device = m2n._TransferServer(), Message(2, 3, jnp.float32), jax.devices()[0]
    numbers = iter([1, 1, 2, 2, 3])
    monkeypatch.setattr(office, "_transfer_id", lambda *_: next(numbers))
    sent = jnp.arange(6.0).reshape(2, 3)
    office.offer(0, [sent])
    (first,) = office.pull(0, message, [device])
    jax.block_until_ready(first)
    (late,) = office.pull(0, message, [device])
    time.sleep(0.5)
    assert not late.is_ready()
    office.offer(0, [sent])
    np.testing.assert_array_equal(late, sent)
    time.sleep(1.2)
    assert not caplog.records
    (never,) = office.pull(0, message, [device])
    end = time.monotonic() + 30
    while not never.is_ready():
        assert time.monotonic() < end, "it is waited for still"
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="SocketServer: Connection closed"):
        jax.block_until_ready(jax.jit(lambda x: x + 1)(never))
    np.testing.assert_array_equal(first, sent)
    (record,) = caplog.records
    assert "process 0 has sent nothing for 1 s" in record.getMessage()


def test_a_process_that_has_ended_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        m2n._check_listens(1, address)
    with pytest.raises(RuntimeError, match=rf"^SocketServer: process 1 at {address}: .*refused"):
        m2n._check_listens(1, address)


def test_unknown_ways_are_refused_in_one_line():
    mesh = sides(1, 1)
    with pytest.raises(
        ValueError, match="m2n='mail' is not known: choose among device_put, collective"
    ):
        make_exchange("mail", mesh.attention, mesh.experts)


def test_a_host_is_known_by_an_address_that_others_reach(monkeypatch):
    known = {"a": ["127.0.1.1", "10.0.0.7"], "b": ["127.0.1.1"]}

    def resolved(name, *_):
        if name not in known:
            raise m2n.socket.gaierror
        return [(None, None, None, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(m2n.socket, "getaddrinfo", resolved)
    assert reachable_host(["b", "b"], 1) == "127.0.0.1"
    assert reachable_host(["b", "a"], 1) == "10.0.0.7"
    for name in ("b", "c"):
        with pytest.raises(ValueError, match=f"other hosts reach '{name}'.*use \"collective\""):
            reachable_host([name, "a"], 0)
