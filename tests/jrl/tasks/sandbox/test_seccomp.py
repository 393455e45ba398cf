"""Seccomp filter, run by an interpreter of its instructions."""

import errno
import os
import struct

import pytest
from confinement import needs_bubblewrap

from jrl.tasks.sandbox.sandbox import Sandbox
from jrl.tasks.sandbox.seccomp import ARCHITECTURES, BLOCKED_CALLS, seccomp_filter

X86, ARM = 0xC000003E, 0xC00000B7
ALLOWED = 0
READ = {"x86_64": 0, "aarch64": 63}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
IOCTL = {"x86_64": 16, "aarch64": 29}


def verdict(rules, audit, number, *arguments):
    """The error that a system call fails with; 0 if it is allowed."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("=HBBI", rules))
    position, value = 0, 0
    tests = {0x15: int.__eq__, 0x25: int.__gt__, 0x35: int.__ge__, 0x45: lambda a, b: bool(a & b)}
    while True:
        code, yes, no, constant = lines[position]
        position += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            if constant == 0x7FFF0000:
                return ALLOWED
            assert constant >> 16 == 5
            return constant & 0xFFFF
        else:
            position += yes if tests[code](value, constant) else no


@pytest.mark.parametrize(("machine", "audit"), [("x86_64", X86), ("aarch64", ARM)])
def test_calls_are_allowed_and_refused(machine, audit):
    rules = seccomp_filter(network=False, machine=machine)
    networked = seccomp_filter(network=True, machine=machine)
    column = ARCHITECTURES[machine][0]
    refused = {numbers[column] for numbers in BLOCKED_CALLS.values()} - {None}
    assert len(refused) == sum(numbers[column] is not None for numbers in BLOCKED_CALLS.values())
    special = {435, CLONE[machine], SOCKET[machine], IOCTL[machine]}
    for number in range(457):
        expected = errno.EPERM if number in refused else ALLOWED
        if number not in special:
            assert verdict(rules, audit, number) == expected, number
    for number in (435, 457, 500, 2**30, 2**30 + 56, 2**31):
        assert verdict(rules, audit, number) == errno.ENOSYS
    assert verdict(rules, X86 + ARM - audit, READ[machine]) == errno.ENOSYS
    assert verdict(rules, 0x40000003, READ[machine]) == errno.ENOSYS  # 32 bits

    # What `fork` and threads are made by, and namespaces.
    for flags, expected in (
        *((0x01200011, ALLOWED), (0x003D0F00, ALLOWED), (0x10000011, errno.EPERM)),
        *((0x20000011, errno.EPERM), (0x40000011, errno.EPERM), (0x00020011, errno.EPERM)),
    ):
        assert verdict(rules, audit, CLONE[machine], flags) == expected
    for request, expected in (
        *((0x5401, ALLOWED), (0x5412, errno.EPERM), (0x541C, errno.EPERM)),
        # The kernel reads the low half.
        *((2**32 + 0x5412, errno.EPERM), (2**32 + 0x5401, ALLOWED)),
    ):
        assert verdict(rules, audit, IOCTL[machine], 0, request) == expected
    for family in range(46):
        for made, known in ((rules, {1}), (networked, {2, 10})):
            expected = ALLOWED if family in known else errno.EAFNOSUPPORT
            assert verdict(made, audit, SOCKET[machine], family, 1) == expected


def test_other_architectures_have_none():
    assert seccomp_filter(network=False, machine="riscv64") is None


@needs_bubblewrap
@pytest.mark.skipif(os.uname().machine not in ARCHITECTURES, reason="no filter is known for it")
def test_the_kernel_takes_it_and_plain_programs_run():
    code = (
        "import socket, threading, asyncio, selectors, mmap, tempfile\n"
        "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))\n"
        "thread = threading.Thread(target=print, args=(2,)); thread.start(); thread.join()\n"
        "async def main(): return await asyncio.to_thread(len, 'abc')\n"
        "print(asyncio.run(main()), len(mmap.mmap(-1, 4096)))\n"
    )
    assert Sandbox(seconds=60).run(code) == "b'x'\n2\n3 4096\n"
