"""The pipeline's schedule against a simulator that knows only what depends on what."""

import itertools

import pytest

from sharding.schedule import Schedule

GRID = [
    Schedule(stages, num_micro_batches, num_chunks)
    for stages, num_micro_batches, num_chunks in itertools.product(
        (1, 2, 3, 4), range(1, 10), (1, 2, 3)
    )
]


def works(schedule):
    """Everything done, in order: (tick, stage, "forward" or "backward", micro, chunk)."""
    done = []
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            for name in ("forward", "backward"):
                work = getattr(schedule, name)(tick, stage)
                if work.active:
                    chunk = work.chunk * schedule.stages + stage
                    done.append((tick, stage, name, work.micro_batch, chunk))
    return done


def needs(schedule, name, micro_batch, chunk):
    """What must be done before a chunk can run, and whether a message brings it."""
    last = schedule.stages * schedule.num_chunks - 1
    if name == "forward":
        return [(("forward", micro_batch, chunk - 1), 1)] if chunk else []
    if chunk == last:
        return [(("forward", micro_batch, chunk), 0)]
    return [(("backward", micro_batch, chunk + 1), 1)]


@pytest.mark.parametrize("schedule", GRID, ids=str)
def test_everything_runs_once_and_after_what_it_needs(schedule):
    ticks = {}
    for tick, _, name, micro_batch, chunk in works(schedule):
        assert (name, micro_batch, chunk) not in ticks
        ticks[name, micro_batch, chunk] = tick
    chunks = range(schedule.stages * schedule.num_chunks)
    assert ticks.keys() == set(
        itertools.product(("forward", "backward"), range(schedule.num_micro_batches), chunks)
    )
    for (name, micro_batch, chunk), tick in ticks.items():
        for before, message in needs(schedule, name, micro_batch, chunk):
            assert ticks[before] + message <= tick
    assert {min(ticks.values()), max(ticks.values())} == {0, schedule.ticks - 1}
    forward = {tick for (name, *_), tick in ticks.items() if name == "forward"}
    backward = {tick for (name, *_), tick in ticks.items() if name == "backward"}
    assert forward == set(range(schedule.forward_ticks))
    assert backward == set(range(schedule.warmup, schedule.ticks))


def simulated_time(schedule, forward, backward):
    """When all stages are done that do their work in this order, each as soon as it can."""
    ended, free = {}, [0.0] * schedule.stages
    for _, stage, name, micro_batch, chunk in works(schedule):
        ready = [ended[before] for before, _ in needs(schedule, name, micro_batch, chunk)]
        free[stage] = max([free[stage], *ready]) + (forward if name == "forward" else backward)
        ended[name, micro_batch, chunk] = free[stage]
    return max(free)


@pytest.mark.parametrize("schedule", GRID, ids=str)
def test_the_bubble_is_the_formulas(schedule):
    busy = schedule.num_micro_batches * schedule.num_chunks * 3.0
    # In lockstep: every tick lasts as long as the longest work in it.
    kinds = {(tick, name) for tick, _, name, _, _ in works(schedule)}
    lockstep = sum(1.0 if name == "forward" else 2.0 for _, name in kinds)
    assert schedule.bubble == pytest.approx(lockstep / busy - 1)
    # Stages that need not wait for a tick to end may make up for gaps, and for nothing else.
    free_running = simulated_time(schedule, 1.0, 2.0) / busy - 1
    assert free_running <= schedule.bubble + 1e-9
    if schedule.num_chunks == 1 or schedule.num_micro_batches % schedule.stages == 0:
        assert schedule.bubble == pytest.approx(free_running)
        published = (schedule.stages - 1) / (schedule.num_micro_batches * schedule.num_chunks)
        assert schedule.bubble == pytest.approx(published)


@pytest.mark.parametrize("schedule", GRID, ids=str)
def test_what_is_kept_has_a_place_until_it_is_read(schedule):
    places = [{} for _ in range(schedule.stages)]
    peak = 0
    for tick, stage, name, micro_batch, chunk in works(schedule):
        slot = schedule.slot(getattr(schedule, name)(tick, stage))
        assert 0 <= slot < schedule.num_saved
        if name == "forward":
            assert slot not in places[stage]
            places[stage][slot] = micro_batch, chunk
            peak = max(peak, *(len(saved) for saved in places))
        else:
            assert places[stage].pop(slot) == (micro_batch, chunk)
    assert not any(places)
    assert peak <= schedule.num_saved <= 2 * schedule.stages * schedule.num_chunks - 1
    if schedule.num_chunks == 1:
        assert (
            peak == schedule.num_saved == min(2 * schedule.stages - 1, schedule.num_micro_batches)
        )


def test_more_micro_batches_keep_no_more():
    assert {Schedule(4, number, 2).num_saved for number in range(8, 100)} == {15}
    assert {Schedule(4, number).num_saved for number in range(7, 100)} == {7}


@pytest.mark.parametrize("name", ["stages", "num_micro_batches", "num_chunks"])
def test_sizes_start_at_one(name):
    with pytest.raises(ValueError, match=rf"{name}=0 must be at least 1"):
        Schedule(**{"stages": 2, "num_micro_batches": 2, "num_chunks": 2, name: 0})
