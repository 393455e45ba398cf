"""Seccomp filter of the sandbox: a BPF program that blocks system calls code does not need.

Blocked are calls that reach other processes, mounts, namespaces, keys, modules, clocks, and memory
that no limit counts (System V segments, message queues, memfd); sockets of all families but one
that cannot leave the sandbox; characters put into a terminal's input; 32-bit calls, and calls that
are newer than this list.
"""

import errno
import os
import struct
import sys

NAMESPACES = 0x7E020000
"""Flags of `clone` that make namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID,
NEWNET."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
NEWEST_CALL = 456
"""Number of the newest system call that was reviewed, futex_requeue of Linux 6.7."""
X32 = 0x40000000

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `BLOCKED_CALLS`, and number in the kernel's audit interface."""

BLOCKED_CALLS: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Large interfaces of the kernel that plain programs do not use.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # The machine.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # Memory that no limit of a process includes, and the placement of memory.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
"""Numbers on x86_64 and aarch64; None if the architecture lacks the call."""
CLONE, CLONE3, IOCTL, SOCKET = (56, 220), (435, 435), (16, 29), (41, 198)

# Of linux/bpf_common.h, linux/filter.h and linux/seccomp.h.
LOAD, EQUAL, GREATER, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16


def seccomp_filter(*, network: bool, machine: str | None = None) -> bytes | None:
    """The filter as ``bwrap --seccomp`` reads it; None on an unsupported architecture.

    Args:
      network: whether internet sockets are allowed; otherwise only Unix sockets are, and the host's
        are not visible in the sandbox.
      machine: as named by `os.uname`; None is this one.
    """
    machine = os.uname().machine if machine is None else machine
    # A 32-bit interpreter makes only 32-bit calls, and the filter blocks them.
    if machine not in ARCHITECTURES or sys.maxsize < 2**32:
        return None
    column, audit = ARCHITECTURES[machine]
    other = (RETURN, 0, 0, ERROR | errno.ENOSYS)
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), other]
    lines.append((LOAD, 0, 0, NUMBER))
    if machine == "x86_64":
        lines += fail_when(AT_LEAST, X32, errno.ENOSYS)
    lines += fail_when(GREATER, NEWEST_CALL, errno.ENOSYS)
    # A filter cannot read the flags of `clone3`; if it fails, libraries use `clone`.
    lines += fail_when(EQUAL, CLONE3[column], errno.ENOSYS)
    for numbers in BLOCKED_CALLS.values():
        if (number := numbers[column]) is not None:
            lines += fail_when(EQUAL, number, errno.EPERM)
    lines += check_argument(CLONE[column], 0, fail_when(ANY_BIT, NAMESPACES, errno.EPERM))
    terminal = [*fail_when(EQUAL, TIOCSTI, errno.EPERM), *fail_when(EQUAL, TIOCLINUX, errno.EPERM)]
    lines += check_argument(IOCTL[column], 1, terminal)
    families = (AF_INET, AF_INET6) if network else (AF_UNIX,)
    allowing = [line for family in families for line in allow_when(family)]
    reject = (RETURN, 0, 0, ERROR | errno.EAFNOSUPPORT)
    lines += check_argument(SOCKET[column], 0, [*allowing, reject])
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


Line = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, constant."""


def fail_when(test: int, constant: int, error: int) -> list[Line]:
    """Fails with the error if the test holds."""
    return [(test, 0, 1, constant), (RETURN, 0, 0, ERROR | error)]


def allow_when(value: int) -> list[Line]:
    """Allows the call if the loaded value equals this value."""
    return [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]


def check_argument(number: int, position: int, lines: list[Line]) -> list[Line]:
    """Instructions for one call, on the low half of its argument at this position."""
    # Both architectures are little-endian: the low half comes first.
    body = [(LOAD, 0, 0, ARGUMENTS + 8 * position), *lines, (LOAD, 0, 0, NUMBER)]
    return [(EQUAL, 0, len(body), number), *body]
