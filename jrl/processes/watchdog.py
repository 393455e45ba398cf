"""Watchdog of a run: names the process that hangs, writes stacks, and ends a run that is held up.

Every process has one. It reads the progress of its own process, sends it to the others as a
heartbeat, and compares all of them once a second, in threads of its own.
"""

import contextlib
import faulthandler
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from jrl.processes import progress
from jrl.processes.progress import (
    AGREEMENT,
    CHECKPOINT,
    COMPILE,
    ENVIRONMENT,
    REWARD,
    Position,
    Progress,
)

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
INTERVAL = 1.0
"""Seconds between two looks, and between two heartbeats of up to `MANY` processes."""
MANY = 64
"""Processes from which on heartbeats become rarer, so that process 0 has as many in a second."""
SILENCE = 45.0
"""Most seconds after the last heartbeat until a run is ended; the process is named after half of
it."""
JAX_HEARTBEAT, JAX_NEVER = 400, 10**7
"""Seconds after the last heartbeat until JAX ends a run, at the earliest after half of them, with
no line that names a process: later than the watchdog, and never if that is off."""
GRACE = 30.0
"""Most seconds for which a process that is late may still come back after it has been named."""
STACKS_SECONDS = 10.0
"""Seconds for writing stacks to a file, which may be on a file system that hangs."""


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


@runtime_checkable
class Store(Protocol):
    """Texts of all processes of a run, of which each replaces its own. Calls may block."""

    def publish(self, text: str) -> None: ...

    def read(self) -> dict[int, str]: ...


@dataclass(frozen=True)
class WatchdogSettings:
    """Settings of the watchdog of one process.

    Attributes:
      process, num_processes: its index, and the number of all.
      host: the name of its machine.
      stacks: folder for the stacks of all processes.
      deadline: seconds that a phase may take without progress, before the run is ended; 0 watches
        nothing; None is `BASE_DEADLINE`, after which a run of one process is only warned about.
    """

    process: int
    num_processes: int
    host: str
    stacks: Path
    deadline: float | None = None

    @property
    def silence(self) -> float:
        """Seconds after the last heartbeat until the run is ended."""
        return SILENCE if self.deadline is None else min(SILENCE, self.deadline)

    @property
    def grace(self) -> float:
        """Seconds from the line that names a late process to the end of the run."""
        return GRACE if self.deadline is None else min(GRACE, self.deadline)


class Watchdog:
    """Watches a run, from `__enter__` to `__exit__`.

    Time in which this process itself is frozen does not count.

    Args:
      settings: settings of this process.
      store: of the heartbeats of all processes; None in a run of one.
      end: ends this process, given a line for the user and the number of processes that are silent;
        it does not return.
      print_line: prints a line for the user.

    Attributes:
      progress: record of this process, of which `__enter__` starts a new one.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        store: Store | None,
        end: Callable[[str, int], None],
        print_line: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        self._settings, self._store = settings, store
        self._end, self._print_line = end, print_line
        self._base = BASE_DEADLINE if settings.deadline is None else settings.deadline
        self.progress = Progress()
        self._position = self.progress.position()
        self._idle, self._longest = 0.0, dict[str, float]()
        self._own = self._make_record()
        self._peers: dict[int, Record] = {}  # the last of each, with the seconds since it came
        self._store_silence = 0.0
        self._hang: Hang | None = None
        self._hang_seconds = 0.0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> "Watchdog":
        if self._base == 0:
            return self
        self.progress = progress.start()
        self._stack.enter_context(self.progress.watching_compilation())
        threads = [threading.Thread(target=self._watch, name="jrl watchdog", daemon=True)]
        if self._store is not None:
            threads.append(threading.Thread(target=self._beat, name="jrl heartbeat", daemon=True))
        for thread in threads:
            thread.start()
            # The store may not answer at the end, so the wait for it is bounded.
            self._stack.callback(thread.join, 2 * INTERVAL)
        self._stack.callback(self._stop.set)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch, before the end of its block too; more than once does no harm."""
        self._stack.close()

    def status(self) -> tuple[str, float, str | None]:
        """Phase of this process, the seconds since it was entered, and a line if it hangs."""
        position, hang = self.progress.position(), self._hang
        line = None
        # One that waits for another process is not to be restarted alone.
        if hang is not None and self._settings.process in hang.processes:
            line = self._describe(hang)
        return position.phase, position.seconds, line

    def tick(self, seconds: float) -> None:
        """Looks at this process and at what has been received, `seconds` after the last time."""
        position = self.progress.position()
        if position.heartbeats == self._position.heartbeats:
            self._idle += seconds
        else:
            before = self._position
            if not before.compiles:
                longest = self._longest.get(before.phase, 0.0)
                self._longest[before.phase] = max(longest, self._idle)
            self._idle = 0.0
        self._position = position
        self._own = self._make_record()
        with self._lock:
            self._store_silence += seconds
            records = [self._own, *self._peer_records()]
        # With half of the seconds a process is named, with all of them the run is ended.
        self._react(find_hang(records, self._settings.silence / 2), seconds)

    def receive(self, texts: dict[int, str], seconds: float) -> None:
        """Takes the heartbeats of all processes, `seconds` after the last time."""
        with self._lock:
            self._store_silence = 0.0
            for process, text in texts.items():
                record, peer = Record.from_text(text), self._peers.get(process)
                if process == self._settings.process:
                    continue
                if peer is not None and record.beat == peer.beat:
                    record = replace(peer, silence=peer.silence + seconds)
                self._peers[process] = record

    def _make_record(self) -> Record:
        position, settings = self._position, self._settings
        is_slow = position.compiles or position.is_first
        has_deadline = settings.deadline is not None
        return Record(
            process=settings.process,
            host=settings.host,
            phase=COMPILE if position.compiles else position.phase,
            outer=position.phase if position.compiles else position.outer,
            part=position.part,
            step=position.step,
            agreements=position.agreements,
            idle=round(self._idle, 1),
            deadline=deadline_of(position, self._base, self._longest.get(position.phase, 0.0)),
            is_slow=is_slow,
            can_end=has_deadline or (settings.num_processes > 1 and not is_slow),
        )

    def _peer_records(self) -> list[Record]:
        """Records of the others. Process 0 has the store: if that does not answer, it is silent."""
        return [
            replace(peer, silence=max(peer.silence, self._store_silence)) if process == 0 else peer
            for process, peer in sorted(self._peers.items())
        ]

    def _react(self, hang: Hang | None, seconds: float) -> None:
        """Reports a hang and its end, and ends the run if it lasts."""
        before, self._hang = self._hang, hang
        if hang is None:
            if before is not None and self._speaks_of(before):
                self._print_line(f"{names_of(before.late)} again made progress")
            return
        kind = hang.processes, hang.is_silent
        if before is None or (before.processes, before.is_silent) != kind:
            self._hang_seconds = 0.0
            line = self._describe(hang)
            if self._speaks_of(hang):
                self._print_line(f"warning: {line}")
            self._write_stacks(line, [*hang.late, *hang.others])
            return
        self._hang_seconds += seconds
        lasts = self._hang_seconds > self._settings.grace
        is_over = hang.exceeds(self._settings.silence) if hang.is_silent else lasts
        if is_over and hang.can_end:
            self._end(
                f"error: {self._describe(hang)}; the run is ended, continue it with --resume",
                len(hang.late) if hang.is_silent else 0,
            )

    def _speaks_of(self, hang: Hang) -> bool:
        """True in the first process that can speak of a hang; the others print only their end."""
        able = hang.others if hang.is_silent else (*hang.late, *hang.others)
        return self._settings.process == min(record.process for record in able)

    def _describe(self, hang: Hang) -> str:
        return describe(hang, str(self._settings.stacks))

    def _write_stacks(self, line: str, records: Sequence[Record]) -> None:
        """Appends the stacks of all threads to this process's file."""
        settings = self._settings
        path = settings.stacks / f"process-{settings.process}.txt"
        header = "\n".join(
            [time.strftime("%Y-%m-%d %H:%M:%S"), line, *map(Record.to_text, records)]
        )
        thread = threading.Thread(
            target=write_stacks, args=(path, header), name="jrl stacks", daemon=True
        )
        thread.start()
        thread.join(STACKS_SECONDS)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(INTERVAL):
            now = time.monotonic()
            # Of a pause of this process only as much as of one look.
            self.tick(min(now - before, 2 * INTERVAL))
            before = now

    def _beat(self) -> None:
        assert self._store is not None
        interval = INTERVAL * max(1.0, self._settings.num_processes / MANY)
        beat, ends, before = 0, False, time.monotonic()
        while not ends:
            beat += 1
            # Errors of a link that is down: JAX reports those that are final.
            with contextlib.suppress(RuntimeError):
                self._store.publish(replace(self._own, beat=beat).to_text())
                texts, now = self._store.read(), time.monotonic()
                # What was not read for a while is no silence of the others.
                self.receive(texts, min(now - before, 2 * interval))
                before = now
            ends = self._stop.wait(interval)
        with contextlib.suppress(RuntimeError):
            self._store.publish(replace(self._own, beat=beat + 1, has_ended=True).to_text())


def jax_heartbeat(deadline: float | None) -> int:
    """Seconds after the last heartbeat until JAX itself ends a run, given `hang_deadline`."""
    return JAX_NEVER if deadline == 0 else JAX_HEARTBEAT


def write_stacks(path: Path, header: str) -> None:
    """Appends the stacks of all threads of this process to a file, after a header; to standard
    error where the file cannot be written."""
    names = "\n".join(f"0x{each.ident or 0:016x} {each.name}" for each in threading.enumerate())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{header}\n{names}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
    except OSError as error:
        print(f"warning: {path}: {error.strerror}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
