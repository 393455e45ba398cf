"""Moments of a run's checkpoints."""

import pytest

from jrl.runs import checkpoints
from jrl.runs.checkpoints import CheckpointSchedule


# Steps of three minutes; every seventh step also ends a checkpoint.
@pytest.mark.parametrize(
    ("every", "minutes", "steps"),
    [
        (7, None, [7, 14]),
        (7, 100.0, [7, 14]),
        (7, 10.0, [4, 7, 11, 14]),
        (100, 10.0, [4, 8, 12]),
        (100, 3.0, list(range(1, 15))),
    ],
)
def test_is_due_by_steps_or_minutes(every, minutes, steps):
    now = [50.0]
    schedule = CheckpointSchedule(every, minutes, clock=lambda: now[0])
    found = []
    for step in range(1, 15):
        now[0] += 180.0
        if schedule.is_due(step):
            found.append(step)
            schedule.saved()
    assert found == steps


@pytest.mark.parametrize("is_main", [True, False])
def test_is_due_by_the_clock_of_the_first_process(is_main, monkeypatch):
    """A process whose own clock is ahead does what the first one says."""
    said = []
    monkeypatch.setattr(checkpoints, "is_main_process", lambda: is_main)
    monkeypatch.setattr(checkpoints, "any_of", lambda flag: said.append(flag) or True)
    now = [0.0]
    schedule = CheckpointSchedule(100, 10.0, clock=lambda: now[0])
    now[0] = 601.0
    assert schedule.is_due(1) and said == [is_main]
