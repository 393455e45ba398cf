"""Random moments of a run: in its start, or in a phase of one of its next steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from campaign.faults.attempt import Attempt, Event
from campaign.faults.program import ENDED, SAVED, STEP
from campaign.faults.settings import STEPS

START_SHARE = 0.3
"""Share of the moments that are in a start."""
AHEAD = 2
"""Most steps from the last one to the step of a moment."""
START = "start"
LIMIT = 600.0
"""Most seconds until a run reaches a moment."""


@dataclass(frozen=True)
class Rhythm:
    """Durations of a run without faults.

    Attributes:
      start: seconds from its start to its second step.
      step: seconds of a step.
      phases: most seconds of each phase of a process, up to what the process announces next.
    """

    start: float
    step: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Moment:
    """A moment of a run: `delay` seconds after a process has entered a phase in a step, or in a
    later one; or after the start of the run."""

    process: int
    phase: str
    step: int
    delay: float

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step}" if self.step else self.phase
        return f"process {self.process}, {where} + {self.delay:.3f} s"


def rhythm_of(begun: float, events: Sequence[Event]) -> Rhythm:
    """Durations of an undisturbed run.

    Args:
      begun: time of its start.
      events: its announcements.
    """
    # The first step of an attempt compiles.
    first = min(event.time for event in events if (event.phase, event.step) == (STEP, 2))
    last = max(event.time for event in events if event.phase == STEP)
    phases: dict[str, float] = {}
    for process in {event.process for event in events}:
        own = [event for event in events if event.process == process and event.time >= first]
        for event, following in pairwise(own):
            if event.phase not in (SAVED, ENDED):
                seconds = following.time - event.time
                phases[event.phase] = max(phases.get(event.phase, 0.0), seconds)
    return Rhythm(first - begun, (last - first) / (STEPS - 2), phases)


def draw_moment(
    draw: Random, rhythm: Rhythm, processes: int, last_step: int, at_start: bool
) -> Moment:
    """Random moment of a run.

    Args:
      last_step: the last step that has begun; 0 without any.
      at_start: true if it may be in the start of a run, which has just been started.
    """
    process = draw.randrange(processes)
    if at_start and draw.random() < START_SHARE:
        return Moment(process, START, 0, draw.uniform(0, rhythm.start))
    phase = draw.choice(sorted(rhythm.phases))
    step = min(max(last_step, 1) + draw.randint(0, AHEAD), STEPS)
    return Moment(process, phase, step, draw.uniform(0, rhythm.phases[phase]))


def reach(attempt: Attempt, moment: Moment) -> float | None:
    """Time of a moment, up to its delay; None if the processes end before it."""
    if moment.phase == START:
        return attempt.begun

    def is_step(event: Event) -> bool:
        found = event.process, event.phase
        return found == (moment.process, STEP) and event.step >= moment.step

    step = attempt.wait_for(is_step, LIMIT)
    if step is None or moment.phase == STEP:
        return None if step is None else step.time

    def is_phase(event: Event) -> bool:
        found = event.process, event.phase
        return found == (moment.process, moment.phase) and event.time >= step.time

    phase = attempt.wait_for(is_phase, LIMIT)
    return None if phase is None else phase.time
