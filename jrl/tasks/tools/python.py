"""Python code that a policy wrote, run in a process of its own with limits.

What is enforced: a limit of wall-clock and processor time, of memory, of the size of a file that is
written and of what is printed; a folder of its own that is removed; an environment without the
trainer's variables; and, on Linux where namespaces are allowed, no network, no sight of other
processes, and an end to whatever it has started. What is not: files that the user can read can be
read. Run policies that are not trusted where there is nothing to read, in a container for example.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jrl.tasks.tools.tool import Tool
from jrl.tasks.workers import sandbox

MEGABYTE = 2**20


@dataclass(frozen=True)
class Sandbox:
    """What code may take.

    Attributes:
      seconds: of time, on the clock and of the processor.
      memory_mb: of address space.
      output: characters that are given back at most; what is longer is cut and says so.
      network: whether it keeps the network; without, it does not run where that cannot be taken
        away.
    """

    seconds: float | int = 3.0
    memory_mb: int = 512
    output: int = 2000
    network: bool = False

    def run(self, code: str) -> str:
        """What the code prints, errors included, and how it ended where that was not well.

        Raises:
          ValueError: where a limit cannot be had on this system.
        """
        settings = {
            "seconds": self.seconds,
            "memory": self.memory_mb * MEGABYTE,
            "file": 16 * MEGABYTE,
            "network": self.network,
        }
        with tempfile.TemporaryDirectory(prefix="jrl-sandbox-") as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", sandbox.__file__, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            printed, late = self._ended(process, code)
        text = printed.decode("utf-8", "replace").replace(str(Path(folder)), ".")
        if process.returncode == sandbox.REFUSED:
            raise ValueError(
                f"{text.strip()}; give Sandbox(network=True) to run code that keeps the network"
            )
        if len(text) > self.output:
            text = text[: self.output] + "\n(cut: more was printed)"
        if late:
            return f"{text}\n(stopped after {self.seconds:g} seconds)".strip()
        if process.returncode:
            return f"{text}\n(ended with status {process.returncode})".strip()
        return text

    def _ended(self, process: "subprocess.Popen[bytes]", code: str) -> tuple[bytes, bool]:
        """What was printed until the process ended or was ended, and whether it was too slow."""
        assert process.stdin is not None and process.stdout is not None
        found = bytearray()
        # A character has four bytes at most; what comes after them is not waited for.
        reader = threading.Thread(
            target=_read, args=(process.stdout, found, 4 * self.output + 4), daemon=True
        )
        reader.start()
        try:
            try:
                process.stdin.write(code.encode("utf-8", "replace"))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it ended before it had read all: its status says how
            reader.join(self.seconds)
            late = reader.is_alive()
            try:
                if not late and len(found) < 4 * self.output + 4:
                    process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                late = True
        finally:  # where the wait was interrupted as well
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
            process.stdout.close()
        return bytes(found), late


def _read(stream: IO[bytes], into: bytearray, most: int) -> None:
    while len(into) < most and (part := os.read(stream.fileno(), min(65536, most - len(into)))):
        into += part


def python_tool(sandbox: Sandbox | None = None) -> Tool:
    """The sandbox as a tool; tried once, so that a limit that cannot be had is known at once.

    Raises:
      ValueError: where it cannot.
    """
    sandbox = Sandbox() if sandbox is None else sandbox
    sandbox.run("")
    network = "a" if sandbox.network else "no"
    code = f"A program; it has {sandbox.seconds:g} seconds and {network} network."

    def run(code: str) -> str:
        return sandbox.run(code)

    description = "Runs Python code and gives what it prints."
    return Tool.of(run, name="python", description=description, about={"code": code})
