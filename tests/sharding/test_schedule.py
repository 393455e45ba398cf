"""The pipeline's schedule against a simulator that knows only what depends on what."""

import itertools

import pytest
from tiers import full_but

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
    """Passes that must be done before a chunk can run, and true for those that a message brings."""
    last = schedule.stages * schedule.num_chunks - 1
    if name == "forward":
        return [(("forward", micro_batch, chunk - 1), 1)] if chunk else []
    if chunk == last:
        return [(("forward", micro_batch, chunk), 0)]
    return [(("backward", micro_batch, chunk + 1), 1)]


@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_schedule_runs_each_pass_once_in_order(schedule):
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


@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_schedule_has_one_pass_per_stage_and_tick(schedule):
    done = [(tick, stage) for tick, stage, *_ in works(schedule)]
    assert len(set(done)) == len(done)
    assert min(tick for tick, _, name, *_ in works(schedule) if name == "backward") == (
        schedule.warmup
    )


@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_forward_schedule_runs_each_pass_once(schedule):
    ticks = {}
    for tick, stage in itertools.product(range(schedule.forward_ticks), range(schedule.stages)):
        work = schedule.forward_only(tick, stage)
        if work.active:
            chunk = work.chunk * schedule.stages + stage
            assert (work.micro_batch, chunk) not in ticks
            ticks[work.micro_batch, chunk] = tick
    assert len(ticks) == schedule.num_micro_batches * schedule.stages * schedule.num_chunks
    # What arrives is used in the next tick.
    assert all(
        tick == ticks[micro_batch, chunk - 1] + 1
        for (micro_batch, chunk), tick in ticks.items()
        if chunk
    )
    assert {min(ticks.values()), max(ticks.values())} == {0, schedule.forward_ticks - 1}


@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_messages_come_before_they_are_used_and_are_not_run_over(schedule):
    """Simulates the messages of each stage from senders, receivers and ticks alone."""
    held = [{"forward": None, "backward": None} for _ in range(schedule.stages)]
    by_tick = {(tick, stage): rest for tick, stage, *rest in works(schedule)}
    last = schedule.stages * schedule.num_chunks - 1
    for tick in range(schedule.ticks):
        made = {}
        for stage in range(schedule.stages):
            name, micro_batch, chunk = by_tick.get((tick, stage), (None, 0, 0))
            if name == "forward" and chunk > 0:
                assert held[stage]["forward"] == (micro_batch, chunk)
            if name == "backward" and chunk < last:
                assert held[stage]["backward"] == (micro_batch, chunk)
            made[stage] = name, micro_batch, chunk
        for name, step, pairs in zip(
            ("forward", "backward"), (1, -1), schedule.messages(tick % 2), strict=True
        ):
            for source, target in pairs:
                done, micro_batch, chunk = made[source]
                wanted = done == name and 0 <= chunk + step <= last
                held[target][name] = (micro_batch, chunk + step) if wanted else None


def simulated_time(schedule, forward, backward):
    """Time at which all stages have done their work in this order, each as soon as it can."""
    ended, free = {}, [0.0] * schedule.stages
    for _, stage, name, micro_batch, chunk in works(schedule):
        ready = [ended[before] for before, _ in needs(schedule, name, micro_batch, chunk)]
        free[stage] = max([free[stage], *ready]) + (forward if name == "forward" else backward)
        ended[name, micro_batch, chunk] = free[stage]
    return max(free)


@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_schedule_bubble_is_the_formula(schedule):
    busy = schedule.num_micro_batches * schedule.num_chunks * 3.0
    # Stages may make up for gaps, and for nothing else.
    free_running = simulated_time(schedule, 1.0, 2.0) / busy - 1
    assert free_running <= schedule.bubble + 1e-9
    if schedule.num_chunks == 1 or schedule.num_micro_batches % schedule.stages == 0:
        assert schedule.bubble == pytest.approx(free_running)
        published = (schedule.stages - 1) / (schedule.num_micro_batches * schedule.num_chunks)
        assert schedule.bubble == pytest.approx(published)


@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_messages_that_both_sides_wait_for_cost_nothing(schedule):
    """A receiver and a sender wait for each other."""
    done = {(tick, stage): name for tick, stage, name, *_ in works(schedule)}
    clock = [0.0] * schedule.stages
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            clock[stage] += {None: 0.0, "forward": 1.0, "backward": 2.0}[done.get((tick, stage))]
        for pairs in schedule.messages(tick % 2):
            clock = [
                max(
                    clock[end] for pair in [(stage, stage), *pairs] if stage in pair for end in pair
                )
                for stage in range(schedule.stages)
            ]
    busy = schedule.num_micro_batches * schedule.num_chunks * 3.0
    assert max(clock) / busy - 1 <= schedule.bubble + 1e-9


@pytest.mark.parametrize("chunks", [None, [0]])
@pytest.mark.parametrize("schedule", full_but(GRID, *GRID[::5]), ids=str)
def test_schedule_slots_hold_inputs_until_read(schedule, chunks):
    slots = schedule.slots(chunks)
    places = [{} for _ in range(schedule.stages)]
    peak = 0
    for tick, stage, name, micro_batch, chunk in works(schedule):
        own = getattr(schedule, name)(tick, stage).chunk
        if chunks is not None and own not in chunks:
            continue
        slot = slots[micro_batch][own]
        if name == "forward":
            assert slot not in places[stage]
            places[stage][slot] = micro_batch, chunk
            peak = max(peak, *(len(saved) for saved in places))
        else:
            assert places[stage].pop(slot) == (micro_batch, chunk)
    assert not any(places)
    # As many places as are taken at once, and not one more.
    assert {slot for of_micro_batch in slots for slot in of_micro_batch} == set(range(peak))
    if chunks is None and schedule.num_chunks == 1:
        assert peak == min(schedule.stages, schedule.num_micro_batches)
    most = schedule.stages * schedule.num_chunks + schedule.stages - 1
    assert peak <= (schedule.stages if schedule.num_chunks == 1 else most)


def test_schedule_slots_do_not_grow_with_micro_batches():
    """Megatron's numbers: p chunks, and of several per stage p v + p - 1."""

    def most(*sizes):
        return 1 + max(map(max, Schedule(*sizes).slots()))

    assert {most(4, number, 2) for number in range(8, 100)} == {11}
    assert {most(4, number) for number in range(4, 100)} == {4}


@pytest.mark.parametrize("name", ["stages", "num_micro_batches", "num_chunks"])
def test_sizes_start_at_one(name):
    with pytest.raises(ValueError, match=rf"{name}=0 must be at least 1"):
        Schedule(**{"stages": 2, "num_micro_batches": 2, "num_chunks": 2, name: 0})
