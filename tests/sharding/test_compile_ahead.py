"""Programs that a thread compiles before their first call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from programs import mesh_of

from sharding.sharded_jit import AWAITED, READY, DeviceJit

SHAPE = (4, 3)


def sharding():
    return NamedSharding(mesh_of("dp1").mesh, PartitionSpec())


def array(value=1.0):
    return jax.device_put(np.full(SHAPE, value, np.float32), sharding())


def abstract(shape=SHAPE):
    # Equivalent to the sharding of `array`, with another spec.
    other = NamedSharding(mesh_of("dp1").mesh, PartitionSpec("dp", None))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=other)


def counted(static=lambda: None):
    """A program, and the names of the threads that traced it."""
    threads = []

    def scale(factor, tree):
        static()
        threads.append(threading.current_thread().name)
        return jax.tree.map(lambda x: factor * x, tree)

    return DeviceJit(scale, static_argnums=0, donate_argnums=1), threads


@contextmanager
def recorded():
    """Names of the events of JAX's monitoring while the context is active."""
    events = []

    def listen(event, seconds, **fields):
        events.append(event.rsplit("/", 1)[1])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_compile_ahead_makes_the_program_of_the_call():
    program, threads = counted()
    with ThreadPoolExecutor(1, "ahead") as executor:
        program.compile_ahead(executor, 2.0, {"x": abstract(), "y": None}).result()
        arguments = {"x": array(3.0), "y": None}
        with recorded() as events:
            result = program(2.0, arguments)
    assert float(result["x"][0, 0]) == 6.0
    assert len(threads) == 1 and threads[0].startswith("ahead")
    assert not [event for event in events if "trace" in event or "compile_dur" in event], events
    assert arguments["x"].is_deleted()


def test_call_waits_for_its_program():
    begun, go = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert go.wait(60)

    program, threads = counted(wait)
    with ThreadPoolExecutor(1, "ahead") as executor, recorded() as events:
        program.compile_ahead(executor, 2.0, abstract())
        assert begun.wait(60)
        threading.Timer(0.05, go.set).start()
        assert float(program(2.0, array())[0, 0]) == 2.0
    assert len(threads) == 1 and threads[0].startswith("ahead")
    assert [e for e in events if e in (AWAITED.rsplit("/")[-1], READY.rsplit("/")[-1])] == [
        "awaited",
        "ready_duration",
    ]


def test_call_compiles_a_program_that_has_not_begun():
    program, threads = counted()
    go = threading.Event()
    with ThreadPoolExecutor(1, "ahead") as executor:
        executor.submit(go.wait, 60)
        future = program.compile_ahead(executor, 2.0, abstract())
        assert float(program(2.0, array())[0, 0]) == 2.0
        go.set()
    assert future.cancelled() and threads == [threading.current_thread().name]


@pytest.mark.parametrize(
    "arguments",
    [(3.0, abstract()), (2.0, abstract((4, 4))), (2.0, {"x": abstract()})],
    ids=["static", "shape", "structure"],
)
def test_call_with_other_arguments_is_another_program(arguments):
    program, threads = counted()
    with ThreadPoolExecutor(1, "ahead") as executor:
        program.compile_ahead(executor, *arguments).result()
        assert float(program(2.0, array())[0, 0]) == 2.0
    assert len(threads) == 2 and threads[1] == threading.current_thread().name


def test_call_raises_the_error_of_the_thread():
    def fail():
        raise ValueError("no such program")

    program, _ = counted(fail)
    with ThreadPoolExecutor(1, "ahead") as executor:
        program.compile_ahead(executor, 2.0, abstract())
        executor.shutdown()
        with pytest.raises(ValueError, match="no such program"):
            program(2.0, array())


def test_forget_ahead_forgets_programs_that_were_not_called():
    def fail():
        raise ValueError("no such program")

    failing, _ = counted(fail)
    with ThreadPoolExecutor(1, "ahead") as executor:
        failing.compile_ahead(executor, 2.0, abstract())
    failing.forget_ahead()
    with pytest.raises(ValueError, match="no such program") as raised:
        failing(2.0, array())
    names = [entry.name for entry in raised.traceback]
    assert "_wait_for_program" not in names
