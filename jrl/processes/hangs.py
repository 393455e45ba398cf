"""Hangs: which processes of a run are late, from the records of all, and the line that says so.

Nothing here reads a clock, a network or a file.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from jrl.processes.progress import AGREEMENT, CHECKPOINT, COMPILE, ENVIRONMENT, REWARD, Position

BASE_DEADLINE = 300.0
"""Default of the seconds that a phase may go with no sign of progress."""
CHECKPOINT_FACTOR = 6
"""Multiple of the deadline for writing and reading checkpoints."""
COMPILE_FACTOR = 12
"""Multiple of the deadline for compilations, and for a phase that is entered for the first time."""
SLOW_FACTOR = 4
"""Multiple of the silence of a process that compiles or loads."""
LONGEST_FACTOR = 10
"""Multiple of the longest time between two heartbeats in a phase that is no hang there."""
REASONS = {
    REWARD: "waiting for verifiers or rewards",
    ENVIRONMENT: "waiting for environments",
    CHECKPOINT: "writing or reading files",
    COMPILE: "compiling",
}
"""Texts for phases that wait for something else than another process."""


@dataclass(frozen=True)
class Record:
    """Heartbeat of one process, and the seconds since.

    Attributes:
      process: its index.
      host: the name of its machine.
      phase, part, step, agreements: as of `jrl.processes.progress.Position`; the phase is "compile"
        while it compiles.
      outer: the phase that `phase` is a part of; empty if there is no such phase.
      idle: seconds since the last sign of progress.
      deadline: idle seconds from which on it is late, if it waits for no other process.
      is_slow: true while it compiles or is in a phase that it has not left before.
      can_end: false if a late process does not end the run.
      beat: number of the record.
      has_ended: true for a process that has left the run.
      silence: seconds since the last record; 0 in what is sent.
    """

    process: int
    host: str
    phase: str
    outer: str = ""
    part: str = ""
    step: int = 0
    agreements: int = 0
    idle: float = 0.0
    deadline: float = BASE_DEADLINE
    is_slow: bool = False
    can_end: bool = True
    beat: int = 0
    has_ended: bool = False
    silence: float = 0.0

    def to_text(self) -> str:
        """JSON of the record."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Record":
        """Inverse of `to_text`; names of other versions are ignored."""
        names = {field.name for field in fields(Record)}
        return Record(**{k: v for k, v in json.loads(text).items() if k in names})


@dataclass(frozen=True)
class Hang:
    """Processes that hold up a run.

    Attributes:
      late: records of the processes that have not arrived.
      others: records of the others.
      is_silent: true if nothing is heard of the late ones.
    """

    late: tuple[Record, ...]
    others: tuple[Record, ...]
    is_silent: bool

    @property
    def processes(self) -> tuple[int, ...]:
        """Indices of the late processes."""
        return tuple(record.process for record in self.late)

    @property
    def can_end(self) -> bool:
        """True if the run may be ended for it."""
        return self.is_silent or all(record.can_end for record in self.late)

    def exceeds(self, silence: float) -> bool:
        """True if nothing has been heard of the late ones for that long, see `silence_limit`."""
        return self.is_silent and all(
            record.silence > silence_limit(record, silence) for record in self.late
        )

    @property
    def seconds(self) -> float:
        """Seconds that it has lasted."""
        return min(record.silence if self.is_silent else record.idle for record in self.late)


def deadline_of(position: Position, base: float, longest: float) -> float:
    """Seconds after the last sign of progress from which a process is late.

    ``max(factor x base, 10 x longest)``, where the factor is 12 for compilations and for a phase
    that is entered for the first time, 6 for checkpoints, and 1 for all others; `longest` is the
    longest time between two heartbeats in the same phase so far, without compilations.
    """
    factor = 1
    if position.compiles or position.is_first:
        factor = COMPILE_FACTOR
    elif position.phase == CHECKPOINT:
        factor = CHECKPOINT_FACTOR
    return max(factor * base, LONGEST_FACTOR * longest)


def find_hang(records: Sequence[Record], silence: float) -> Hang | None:
    """Hang of a run; None if all processes send records and those that others wait for are in time.

    All processes enter the same collectives on host values in the same order. Those that have
    entered the fewest hold up the others; they are late if each of them exceeds its own deadline,
    whatever the others wait for. A process of which nothing is heard is late whatever it did last.

    Args:
      records: records of all processes of which something is known.
      silence: seconds since the last record after which a process is late, see `silence_limit`.
    """
    running = [record for record in records if not record.has_ended]
    if not running:
        return None
    late = [record for record in running if record.silence > silence_limit(record, silence)]
    is_silent = bool(late)
    if not is_silent:
        behind = min(record.agreements for record in running)
        late = [record for record in running if record.agreements == behind]
        if any(record.idle <= record.deadline for record in late):
            return None
    others = tuple(record for record in running if record not in late)
    return Hang(tuple(late), others, is_silent)


def silence_limit(record: Record, silence: float) -> float:
    """Seconds since the last record after which this process is late: four times as many while it
    compiles or loads, when other threads of Python may have to wait."""
    return SLOW_FACTOR * silence if record.is_slow else silence


def describe(hang: Hang, stacks: str) -> str:
    """Line that names the late processes, their phases, what the others do, and the file of all
    stacks."""
    seconds = f"{hang.seconds:.0f} s"
    first = hang.late[0]
    if not hang.others and len(hang.late) > 1 and not hang.is_silent:
        phases = ", ".join(sorted({_phase_text(record) for record in hang.late}))
        return (
            f"all {len(hang.late)} processes have been in {phases} of step {first.step} for "
            f"{seconds} without progress: a collective, a link or a device hangs; stacks of all "
            f"threads: {stacks}"
        )
    names = names_of(hang.late)
    is_one = len(hang.late) == 1
    if hang.is_silent:
        verb = "has sent no heartbeat for" if is_one else "have sent no heartbeat for"
        text = (
            f"{names} {verb} {seconds}: frozen, or the machine or the link is down; last in "
            f"{_phase_text(first)} of step {first.step}"
        )
    else:
        verb = "has been in" if is_one else "have been in"
        text = f"{names} {verb} {_phase_text(first)} of step {first.step} for {seconds}"
        if (reason := REASONS.get(first.phase)) is not None:
            text += f", {reason}"
    if hang.others:
        phase, _ = Counter(map(_phase_text, hang.others)).most_common(1)[0]
        text += f"; the others wait in {phase}"
    return f"{text}; stacks of all threads: {stacks}"


def names_of(records: Sequence[Record]) -> str:
    """Processes of these records, with their machines."""
    return ", ".join(f"process {record.process} (host {record.host})" for record in records)


def _phase_text(record: Record) -> str:
    """Phase of a process: of an agreement, with the phase that it is a part of."""
    text = f"`{record.phase}`"
    if record.phase in (AGREEMENT, COMPILE) and record.outer:
        text += f" (`{record.outer}`)"
    return f"{text}, {record.part}," if record.part else text
