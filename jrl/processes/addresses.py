"""Addresses by which processes on CPUs reach each other, checked before the first collective.

Gloo announces the address of a machine's own name. On Debian and Ubuntu the hosts file gives that
name 127.0.1.1, which means another machine on every machine: the processes then wait for each other
until a time limit.
"""

import ipaddress
import json
import socket

import jax

from jrl.processes.coordinator import coordinator_address, exchange

HOSTS_FILE = "/etc/hosts"


def check_reachable() -> None:
    """Raises ValueError, in all processes, if one announces to other machines an address of its own
    machine alone (for example 127.0.1.1): with the machine, and the line for its hosts file."""
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    target = _resolve(coordinator_address()[0])
    descriptions = exchange(
        "addresses",
        json.dumps(
            {
                "name": socket.gethostname(),
                "local": None if target is None else _local_address(target),
                "announced": _resolve(socket.gethostname()),
                "target": target,
            }
        ),
    )
    if (message := unreachable([json.loads(text) for text in descriptions])) is not None:
        raise ValueError(message)


def unreachable(processes: list[dict[str, str | None]]) -> str | None:
    """Message for the first process that the others cannot reach; None if they can reach all.

    Args:
      processes: of each its machine's name, its address on the way to process 0, the address that
        it announces, and the address of process 0 as it sees it.
    """
    if len({_is_loopback(each["local"]) or each["local"] for each in processes}) == 1:
        return None  # all on one machine
    for index, each in enumerate(processes):
        if not _is_loopback(each["announced"]):
            continue
        # Process 0 sees itself as itself; the others see its address.
        seen = [other["target"] for other in processes[1:]] if index == 0 else [each["local"]]
        address = next((a for a in seen if not _is_loopback(a)), None) or "ITS-ADDRESS"
        return (
            f"process {index} on the machine {each['name']} announces {each['announced']}, which "
            f"no other machine can reach, as {HOSTS_FILE} there gives it to the machine's own "
            f"name: let it have the line '{address} {each['name']}' instead."
        )
    return None


def _resolve(host: str) -> str | None:
    """First address of a name; None if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _local_address(target: str) -> str | None:
    """This machine's address on the way to `target`; nothing is sent."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback
