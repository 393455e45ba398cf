"""Disks and links that can fail: a file system of its own for a run, and two network namespaces.

Both need root on Linux; nothing of the machine's own disks and links is touched.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from campaign.faults.attempt import Host

MEGABYTES = 48
"""Size of the disk of a run, most of which is free."""
STALL, GAP = 1.0, 0.05
"""Seconds for which a slow disk takes no write, and for which it does."""
NAMES = ("near", "far")
"""Machines that are two network namespaces: processes 0 and 1."""


class Unavailable(RuntimeError):
    """What this machine or user cannot do, in a line."""


class Disk:
    """File system of a run: ext4 in a file, on a loop device.

    Args:
      folder: where it is mounted, and its file is kept.
    """

    def __init__(self, folder: Path):
        self.path = folder / "disk"
        self._image, self._filler = folder / "disk.img", self.path / "filler"

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Context manager of the disk, which is empty at first."""
        with self._image.open("wb") as file:
            file.truncate(MEGABYTES << 20)
        do("mkfs.ext4", "-q", "-m", "0", str(self._image))
        self.path.mkdir()
        self._mount()
        try:
            yield self.path
        finally:
            do("umount", str(self.path))

    def fill(self) -> None:
        """Leaves no space on the disk."""
        with self._filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        """Undoes `fill`."""
        self._filler.unlink(missing_ok=True)

    def refuse_writes(self) -> None:
        """Makes the disk read-only as ext4 does after an error of the device: at once, whatever is
        open, and what was not synced is lost."""
        do("mount", "-o", "remount,abort", str(self.path))

    def repair(self) -> None:
        """Undoes `refuse_writes`, as a restart of the machine does."""
        do("umount", str(self.path))
        subprocess.run(["fsck.ext4", "-p", str(self._image)], capture_output=True, check=False)
        self._mount()

    def stall(self, seconds: float) -> None:
        """Makes the disk slow: all writes wait most of the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            do("fsfreeze", "--freeze", str(self.path))
            try:
                time.sleep(STALL)
            finally:
                do("fsfreeze", "--unfreeze", str(self.path))
            time.sleep(GAP)

    def _mount(self) -> None:
        do("mount", "-o", "loop", str(self._image), str(self.path))


class Link:
    """Two network namespaces with a link between them.

    Attributes:
      hosts: of process 0 and process 1.
    """

    def __init__(self, folder: Path):
        self._spaces = [f"jrl-{name}-{os.getpid()}" for name in NAMES]
        self._devices = [f"{name}-{os.getpid()}"[:15] for name in NAMES]
        self._addresses = ["10.77.0.1", "10.77.0.2"]
        hosts = folder / "hosts"
        lines = [f"{a} {name}" for a, name in zip(self._addresses, NAMES, strict=True)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # A name and a hosts file of its own, as another machine has.
        enter = f'hostname "$0" && mount --bind "{hosts}" /etc/hosts && exec "$@"'
        self.hosts = [
            Host(
                ("ip", "netns", "exec", space, "unshare", "-m", "-u", "sh", "-c", enter, name),
                self._addresses[0],
            )
            for space, name in zip(self._spaces, NAMES, strict=True)
        ]

    @contextmanager
    def connected(self) -> Iterator[Sequence[Host]]:
        """Context manager of the namespaces and their link."""
        near, far = self._devices
        with ExitStack() as stack:
            for space in self._spaces:
                do("ip", "netns", "add", space)
                stack.callback(do, "ip", "netns", "delete", space)
            do("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            for space, device, address in zip(
                self._spaces, self._devices, self._addresses, strict=True
            ):
                do("ip", "link", "set", device, "netns", space)
                do("ip", "-n", space, "addr", "add", f"{address}/24", "dev", device)
                do("ip", "-n", space, "link", "set", "lo", "up")
                do("ip", "-n", space, "link", "set", device, "up")
            yield self.hosts

    def cut(self, end: int) -> None:
        """Takes one end of the link down; the other has no carrier then."""
        do("ip", "-n", self._spaces[end], "link", "set", self._devices[end], "down")

    def join(self, end: int) -> None:
        """Undoes `cut`."""
        do("ip", "-n", self._spaces[end], "link", "set", self._devices[end], "up")


def check_disk() -> None:
    """Raises `Unavailable` where `Disk` is."""
    _check("mkfs.ext4", "fsck.ext4", "mount", "fsfreeze")
    if not Path("/dev/loop-control").exists():
        raise Unavailable("needs loop devices")


def check_link() -> None:
    """Raises `Unavailable` where `Link` is."""
    _check("ip", "unshare", "mount")


def _check(*programs: str) -> None:
    if os.geteuid() != 0:
        raise Unavailable("needs root")
    for program in programs:
        if shutil.which(program) is None:
            raise Unavailable(f"needs the program {program}")


def do(*command: str) -> None:
    """Runs a command of the system.

    Raises:
      RuntimeError: with what it printed, where it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
