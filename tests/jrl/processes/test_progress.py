import threading

import jax
import numpy as np

from jrl.processes.progress import AGREEMENT, COMPILED, LOWERED, REWARD, Progress


def test_a_phase_is_that_of_the_main_thread_and_ends_with_its_block():
    now = [0.0]
    progress = Progress(lambda: now[0])
    assert (progress.position().phase, progress.position().step) == ("start", 0)
    progress.begin_step(3)
    with progress.phase("rollout"):
        now[0] = 2.0
        with progress.phase(REWARD):
            now[0] = 7.0
            inner = progress.position()
        outer = progress.position()
    assert (inner.phase, inner.outer, inner.step, inner.seconds) == ("reward", "rollout", 3, 5.0)
    assert (outer.phase, outer.outer, outer.seconds) == ("rollout", "", 7.0)
    assert outer.heartbeats > inner.heartbeats
    assert progress.position().phase == "step"


def test_a_phase_may_compile_until_it_has_been_left():
    progress, seen = Progress(), []
    for _ in range(2):
        with progress.phase("update"), progress.phase(AGREEMENT):
            seen.append(progress.position().is_first)
        with progress.phase("scoring"):
            seen.append(progress.position().is_first)
    assert seen == [False, True, False, False]


def test_collectives_are_counted_in_every_thread_and_phases_in_one():
    progress = Progress()
    position = []

    def sample():
        with progress.phase("rollout"), progress.phase(AGREEMENT):
            position.append(progress.position())

    with progress.phase("update"):
        before = progress.position()
        thread = threading.Thread(target=sample)
        thread.start()
        thread.join()
    assert (position[0].phase, position[0].agreements) == ("update", 1)
    assert position[0].heartbeats > before.heartbeats


def test_parts_are_of_the_phase_that_is_left():
    progress = Progress()
    with progress.phase("update"):
        progress.heartbeat("mini-batch 2")
        progress.heartbeat()
        assert progress.position().part == "mini-batch 2"
    assert progress.position().part == ""


def test_compilations_of_jax_are_seen():
    progress, compiling = Progress(), []

    def watch(event, duration, **fields):
        if event in (LOWERED, COMPILED):
            compiling.append(progress.position().compiles)

    with progress.watching_compilation():
        jax.monitoring.register_event_duration_secs_listener(watch)
        try:
            jax.jit(lambda x: x * 17 - 3).lower(np.ones(2, np.float32)).compile()
        finally:
            jax.monitoring.unregister_event_duration_listener(watch)
    assert compiling[:2] == [True, False]
    assert not progress.position().compiles
