"""Run that meets faults, and is started again after each that ended it, as a scheduler does."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from campaign.faults.attempt import Attempt, End, Event, Host
from campaign.faults.judging import difference, wrong_ends
from campaign.faults.kinds import END_SECONDS, Kind, Missed, Scene
from campaign.faults.machines import Disk, Link
from campaign.faults.moments import LIMIT, Rhythm, draw_moment, reach, rhythm_of
from campaign.faults.program import ENDED, STEP
from campaign.faults.settings import Inputs, flags

START_SECONDS = 10.0
"""Seconds from a fault in a start until what still waits is killed, as launchers do."""
MISSES = 20
"""Moments of a run that may come to nothing, before it is left to its end."""


@dataclass
class Try:
    """One fault of a run and what came of it, a line of the record.

    Attributes:
      kind, processes, link, seed, run: of the run; `link` is true on two network namespaces.
      moment: at which the fault came.
      step: the last step that had begun.
      survived: false where something was wrong.
      reason: what was; empty where nothing was.
      by_jax: processes that JAX ended with its own line.
      refused: the line that had to be said, where the run could not be continued at first.
      seconds_lost: from the fault to the end of the step in progress, without an undisturbed step;
        None where another fault came before.
    """

    kind: str
    processes: int
    link: bool
    seed: int
    run: int
    moment: str
    step: int
    survived: bool = True
    reason: str = ""
    by_jax: int = 0
    refused: str = ""
    seconds_lost: float | None = None
    time: float = field(default=0.0, repr=False)

    def fail(self, reason: str) -> None:
        self.survived, self.reason = False, self.reason or reason

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "time"}


@dataclass(frozen=True)
class Undisturbed:
    """A run without faults: its folder, and how long it took."""

    run: Path
    rhythm: Rhythm


def make_undisturbed(
    hosts: Sequence[Host], inputs: Inputs, folder: Path, cache: Path
) -> Undisturbed:
    """Makes a run without faults, twice: the first fills the cache, the second is timed.

    Raises:
      RuntimeError: where it fails, or the two differ.
    """
    runs, rhythm = [folder / "first" / "run", folder / "second" / "run"], None
    for run in runs:
        run.parent.mkdir(parents=True)
        words = flags(len(hosts), inputs, run, deadline=300)
        attempt = Attempt(hosts, words, run.with_name("output"), cache)
        ends = attempt.end(LIMIT)
        if any(end.status != 0 or end.lines for end in ends):
            raise RuntimeError(f"the undisturbed run failed: {ends}")
        rhythm = rhythm_of(attempt.begun, attempt.events)
    if (reason := difference(*runs)) is not None:
        raise RuntimeError(f"two undisturbed runs differ: {reason}")
    assert rhythm is not None
    return Undisturbed(runs[1], rhythm)


class DisturbedRun:
    """A run of one kind of fault.

    Args:
      kind: of the faults.
      hosts: of its processes.
      link: between them, for kinds that need one.
      inputs: files that it reads.
      undisturbed: the run that it must equal, of the same files.
      folder: for everything that it leaves; it does not exist.
      cache: folder of compiled programs.
    """

    def __init__(
        self,
        kind: Kind,
        hosts: Sequence[Host],
        link: Link | None,
        inputs: Inputs,
        undisturbed: Undisturbed,
        folder: Path,
        cache: Path,
    ):
        self._kind, self._hosts, self._link = kind, hosts, link
        self._undisturbed, self._folder, self._cache = undisturbed, folder, cache
        self._inputs = inputs
        self._attempts: list[Attempt] = []
        self._tries: list[Try] = []
        self._disk: Disk | None = None
        self._run = folder / "run"

    def meet(self, blank: Try, wanted: int) -> list[Try]:
        """Runs to its end, with so many faults at random moments.

        Args:
          blank: what all its tries have in common.
          wanted: tries.
        """
        draw = Random(f"{blank.kind} {blank.processes} {blank.link} {blank.seed} {blank.run}")
        self._folder.mkdir(parents=True)
        with self._place():
            try:
                self._start()
                for _ in range(wanted + MISSES):
                    if len(self._tries) == wanted or not self._meet_one(blank, draw):
                        break
                self._finish()
            finally:
                self._attempts[-1].kill()
        return self._tries

    @contextmanager
    def _place(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._kind.needs == "disk":
                self._disk = Disk(self._folder)
                self._run = stack.enter_context(self._disk.mounted()) / "run"
            yield

    def _start(self) -> None:
        output = self._folder / f"output-{len(self._attempts)}"
        words = flags(len(self._hosts), self._inputs, self._run, self._kind.deadline)
        self._attempts.append(Attempt(self._hosts, words, output, self._cache))

    def _meet_one(self, blank: Try, draw: Random) -> bool:
        """Waits for a moment and strikes then; false where the run has ended or failed."""
        attempt, kind = self._attempts[-1], self._kind
        is_new = not any(event.phase == STEP for event in attempt.events)
        moment = draw_moment(
            draw,
            self._undisturbed.rhythm,
            len(self._hosts),
            self._last_step(),
            kind.at_start and is_new,
        )
        time_of_phase = reach(attempt, moment)
        if time_of_phase is None:
            return False
        time.sleep(max(0.0, time_of_phase + moment.delay - time.monotonic()))
        if not attempt.is_running():
            return False
        one = replace(blank, moment=str(moment), step=self._last_step(), time=time.monotonic())
        scene = Scene(attempt, self._run, self._inputs, kind.deadline, self._disk, self._link)
        self._note_recoveries(one.time)
        try:
            effect = kind.strike(scene, moment.process, draw)
        except Missed:
            return True
        if effect.ends is False:
            self._tries.append(one)
            # Or the next fault would meet what this one left.
            return attempt.wait_for(partial(self._recovers, one), LIMIT) is not None
        is_watched = bool(moment.step) or not attempt.struck
        ends = attempt.end(END_SECONDS if is_watched else START_SECONDS)
        effect.repair()
        if all(end.status == 0 for end in ends):
            return False  # it was too late for a fault
        one.step = self._last_step()  # which may have begun after the fault
        self._tries.append(one)
        self._judge(one, ends, is_watched, effect.said)
        if effect.refused:
            self._start()
            self._judge_refusal(one, effect.refused)
            effect.restore()
        self._start()
        return True

    def _judge(self, one: Try, ends: list[End], is_watched: bool, said: str) -> None:
        attempt = self._attempts[-1]
        finished = {event.process for event in attempt.events if event.phase == ENDED}
        reason = wrong_ends(ends, attempt.struck, finished, is_watched)
        if reason is not None:
            one.fail(reason)
        one.by_jax = sum(end.is_by_jax for end in ends)
        errors = [line for end in ends for line in end.errors]
        if said and not any(re.search(said, line) for line in errors):
            one.fail(f"no process said {said!r}: {' | '.join(errors) or 'nothing'}")

    def _judge_refusal(self, one: Try, refused: str) -> None:
        """The run must not start, and say why in one line."""
        attempt = self._attempts[-1]
        ends = attempt.end(LIMIT)
        one.refused = next((line for end in ends for line in end.errors), "")
        reason = wrong_ends(ends, attempt.struck, set(), is_watched=True)
        if reason is not None:
            one.fail(reason)
        elif not re.search(refused, one.refused):
            one.fail(f"the refusal is no {refused!r}: {one.refused}")

    def _finish(self) -> None:
        """Runs to the end, and compares what came of it."""
        ends = self._attempts[-1].end(LIMIT)
        self._note_recoveries(time.monotonic())
        failed = [number for number, end in enumerate(ends) if end.status != 0]
        if failed:
            said = " | ".join(ends[failed[0]].lines) or "nothing"
            reason = f"process {failed[0]} ended with status {ends[failed[0]].status}: {said}"
            if not self._tries:
                raise RuntimeError(f"the run ended before any fault: {reason}")
            self._tries[-1].fail(reason)
        elif (reason := difference(self._run, self._undisturbed.run)) is not None:
            for each in self._tries:
                each.fail(reason)

    def _last_step(self) -> int:
        events = [event for attempt in self._attempts for event in attempt.events]
        return max((event.step for event in events if event.phase == STEP), default=0)

    def _recovers(self, one: Try, event: Event) -> bool:
        """True for the end of the step that was in progress at a fault."""
        if event.process != 0 or event.time < one.time:
            return False
        return event.phase == ENDED or (event.phase == STEP and event.step > one.step)

    def _note_recoveries(self, until: float) -> None:
        """Notes the seconds that faults cost, of those after which the run has made a step."""
        ends = [one.time for one in self._tries[1:]] + [until]
        for one, end in zip(self._tries, ends, strict=False):
            for event in (event for attempt in self._attempts for event in attempt.events):
                if one.seconds_lost is None and self._recovers(one, event) and event.time <= end:
                    seconds = event.time - one.time - self._undisturbed.rhythm.step
                    one.seconds_lost = round(max(seconds, 0.0), 2)
