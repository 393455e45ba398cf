"""Kinds of faults: what each does to a run that is going on, and what the run has to do then."""

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from campaign.faults.attempt import Attempt
from campaign.faults.machines import Disk, Link
from campaign.faults.settings import Inputs
from tests.support.damages import DAMAGES

CUT_SECONDS, SLOW_SECONDS = 10.0, 8.0
CLOCK_SECONDS = (3600, 86400)
"""Seconds by which a clock is moved, at least and at most, forwards or backwards."""
END_SECONDS = 90.0
"""Most seconds until the processes of a run have ended after a fault that ends it."""
GARBAGE = b'\xff\x00{"step": 3, "score"\n[[[\n'
SILENT = r"has sent no heartbeat for|cannot be reached"


@dataclass(frozen=True)
class Scene:
    """What a fault can reach.

    Attributes:
      attempt: processes of the run.
      run: its folder.
      inputs: files that it reads.
      deadline: seconds after which its watchdog ends it.
      disk, link: of the run, where the kind needs one.
    """

    attempt: Attempt
    run: Path
    inputs: Inputs
    deadline: int
    disk: Disk | None = None
    link: Link | None = None


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Effect:
    """What a fault must come to.

    Attributes:
      ends: true if all processes end, false if the run goes on by itself; None is one of the two.
      said: expression that the error of one process matches.
      repair: what a user does before the run is started again.
      refused: expression of the line with which the run is not started again until `restore`.
      restore: what a user does after that.
    """

    ends: bool | None
    said: str = ""
    repair: Callable[[], None] = nothing
    refused: str = ""
    restore: Callable[[], None] = nothing


class Missed(Exception):
    """There was nothing that the fault could strike."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
      name: as the command has it.
      title: for the table.
      strike: does it, given the scene and the process that it strikes.
      processes: numbers of processes of the runs that it applies to.
      needs: "disk" or "link" of `campaign.faults.machines`, or neither.
      at_start: true if it also strikes runs that start or resume.
      deadline: `--hang-deadline` of the run.
      most: most faults of one run.
    """

    name: str
    title: str
    strike: Callable[[Scene, int, Random], Effect]
    processes: tuple[int, ...] = (1, 2, 4)
    needs: str = ""
    at_start: bool = field(default=False, kw_only=True)
    deadline: int = field(default=30, kw_only=True)
    most: int = field(default=sys.maxsize, kw_only=True)


def kill(scene: Scene, process: int, draw: Random) -> Effect:
    scene.attempt.signal(process, signal.SIGKILL)
    return Effect(ends=True)


def stop(scene: Scene, process: int, draw: Random) -> Effect:
    attempt = scene.attempt
    attempt.signal(process, signal.SIGSTOP)
    if len(attempt.processes) == 1:
        time.sleep(scene.deadline + 3)
        attempt.signal(process, signal.SIGCONT)
        return Effect(ends=False)
    attempt.wait(END_SECONDS, but=process)
    attempt.signal(process, signal.SIGCONT)
    return Effect(ends=True, said=SILENT)


def cut(scene: Scene, process: int, draw: Random) -> Effect:
    assert scene.link is not None
    scene.link.cut(process)
    time.sleep(CUT_SECONDS)
    scene.link.join(process)
    return Effect(ends=False)


def cut_for_good(scene: Scene, process: int, draw: Random) -> Effect:
    assert scene.link is not None
    link = scene.link
    link.cut(process)
    return Effect(ends=True, said=SILENT, repair=lambda: link.join(process))


def fill(scene: Scene, process: int, draw: Random) -> Effect:
    assert scene.disk is not None
    scene.disk.fill()
    return Effect(ends=None, said="No space left on device", repair=scene.disk.free)


def refuse_writes(scene: Scene, process: int, draw: Random) -> Effect:
    assert scene.disk is not None
    scene.disk.refuse_writes()
    return Effect(
        ends=None, said="Read-only file system|Input/output error", repair=scene.disk.repair
    )


def slow_down(scene: Scene, process: int, draw: Random) -> Effect:
    assert scene.disk is not None
    scene.disk.stall(SLOW_SECONDS)
    return Effect(ends=False)


def move_clock(scene: Scene, process: int, draw: Random) -> Effect:
    seconds = draw.randint(*CLOCK_SECONDS) * draw.choice([-1, 1])
    scene.attempt.order(process, f"clock {seconds}")
    return Effect(ends=False)


def corrupt(scene: Scene, process: int, draw: Random) -> Effect:
    """All processes are killed, and one file of the newest checkpoint is damaged."""
    scene.attempt.kill()
    folder = scene.run / "checkpoints"
    steps = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=_number)
    newest = steps[-1]
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    copy = scene.run.parent / "copy of the checkpoint"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(newest, copy)
    draw.choice(DAMAGES)(draw.choice(files))

    def restore() -> None:
        shutil.rmtree(newest)
        shutil.copytree(copy, newest)

    if len(steps) > 1:
        return Effect(ends=True)
    return Effect(ends=True, refused="no checkpoint in .* is intact", restore=restore)


def kill_verifier(scene: Scene, process: int, draw: Random) -> Effect:
    """A worker that computes rewards is killed, which belongs to process 0."""
    trainer = psutil.Process(scene.attempt.processes[0].pid)
    workers = [each for each in trainer.children(recursive=True) if "worker.py" in _command(each)]
    if not workers:
        raise Missed("no worker was there")
    draw.choice(workers).kill()
    return Effect(ends=False)


def scribble(scene: Scene, process: int, draw: Random) -> Effect:
    """All processes are killed, and garbage is in a file of lines: after those of the newest
    checkpoint, which is dropped; before, or among the prompts, which is refused."""
    scene.attempt.kill()
    variant = draw.choice(["after", "before", "prompts"])
    path = scene.run / draw.choice(["metrics.jsonl", "samples.jsonl"])
    if variant == "prompts":
        path = scene.inputs.prompts
    content = path.read_bytes()
    if variant == "after":
        path.write_bytes(content + GARBAGE[: draw.randint(1, len(GARBAGE))])
        return Effect(ends=True)
    if variant == "before":
        path.write_bytes(content[:12] + GARBAGE + content[12 + len(GARBAGE) :])
    else:
        lines = content.splitlines(keepends=True)
        lines.insert(draw.randint(0, len(lines)), b"\xff\x00 is no prompt\n")
        path.write_bytes(b"".join(lines))
    line = rf"{re.escape(str(path))}\b.*"
    return Effect(ends=True, refused=line, restore=lambda: _write(path, content))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _number(path: Path) -> int:
    return int(path.name)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "`kill -9` of a process", kill, at_start=True),
        Kind("stop", "SIGSTOP for longer than the deadline", stop, deadline=15),
        # TCP waits twice as long after each failed try: two cuts within seconds are one of more
        # than the 20 s after which gRPC gives a connection up.
        Kind("cut", "link cut for 10 s", cut, (2,), "link", most=1),
        Kind("cut-for-good", "link cut for good", cut_for_good, (2,), "link", deadline=15),
        Kind("full", "full disk", fill, needs="disk", at_start=True),
        Kind("read-only", "read-only disk", refuse_writes, needs="disk", at_start=True),
        Kind("slow", "slow disk", slow_down, needs="disk", at_start=True),
        Kind("clock", "clock jump", move_clock, at_start=True),
        Kind("checkpoint", "corrupt newest checkpoint", corrupt),
        Kind("verifier", "dead verifier", kill_verifier),
        Kind("garbage", "garbage in JSONL", scribble),
    )
}
