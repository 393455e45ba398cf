"""Addresses that machines give to their own names."""

import pytest

from jrl.processes.coordinator import unreachable


def process(name, local, announced, target="10.0.0.1"):
    return {"name": name, "local": local, "announced": announced, "target": target}


A = process("a", "10.0.0.1", "10.0.0.1")
B = process("b", "10.0.0.2", "10.0.0.2")


@pytest.mark.parametrize(
    "processes",
    [
        [A, B],
        [process("a", "127.0.0.1", "127.0.1.1", "127.0.0.1")] * 2,
        [process("a", "127.0.1.1", "127.0.1.1"), process("a", "127.0.0.1", "127.0.1.1")],
        [process("a", "10.0.0.1", "127.0.1.1")] * 2,  # one machine, by its address
        [process("a", "::1", "::1", "::1")] * 2,
        [A, process("b", None, None)],  # what cannot be found out is left to the connection
    ],
)
def test_unreachable_is_none_for_reachable_addresses(processes):
    assert unreachable(processes) is None


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (
            [A, process("b", "10.0.0.2", "127.0.1.1")],
            ("process 1 on the machine b announces 127.0.1.1", "the line '10.0.0.2 b' instead"),
        ),
        (
            [process("a", "127.0.1.1", "127.0.1.1", "127.0.1.1"), B],
            ("process 0 on the machine a announces 127.0.1.1", "the line '10.0.0.1 a' instead"),
        ),
        (
            [process("a", "fd00::1", "::1", "fd00::1"), process("b", "fd00::2", "fd00::2")],
            ("process 0 on the machine a announces ::1",),
        ),
    ],
)
def test_an_own_name_of_the_loopback_is_named_with_the_fix(processes, words):
    message = unreachable(processes)
    assert message is not None
    for each in words:
        assert each in message
