"""A save returns before its checkpoint is on disk, which then holds the state of the call."""

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jrl.processes import progress
from jrl.processes.coordinator import BackgroundGather
from jrl.runs import checkpoints as module
from jrl.runs import storage
from jrl.runs.checkpoints import Checkpoints


@pytest.fixture
def gate(monkeypatch):
    """Writes wait until it is opened."""
    gate, write = threading.Event(), module._write_host_arrays

    def late(path, items):
        assert gate.wait(60)
        write(path, items)

    monkeypatch.setattr(module, "_write_host_arrays", late)
    yield gate
    gate.set()


SPECS = {"sharded": P("x"), "replicated": P()}


@pytest.mark.parametrize("placement", full_but(["one device", *SPECS], "one device"))
def test_the_state_is_that_of_the_call(placement, gate, tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = jax.devices()[0]
    if placement in SPECS:
        sharding = NamedSharding(mesh, SPECS[placement])
    rows = np.arange(4096, dtype=np.float32)
    # Not the memory of `rows`, which JAX would not overwrite.
    state = {"w": jax.device_put(rows, sharding) + 0, "cursor": rows.copy()}
    meta = {"lines": [1]}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state, meta)
    buffers = {shard.data.unsafe_buffer_pointer() for shard in state["w"].addressable_shards}
    # Directly after: the buffers are donated and hold other numbers.
    after = jax.jit(lambda w: -w, donate_argnums=0)(state["w"])
    # But for JAX 0.11 on a CPU, which keeps the memory of arrays whose transfer has begun.
    reused = {shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards} == buffers
    assert reused or jax.__version__.startswith("0.11.")
    state["cursor"][:] = 0
    meta["lines"].append(2)
    assert checkpoints.steps() == []
    gate.set()
    checkpoints.wait()
    like = {"w": jax.ShapeDtypeStruct(rows.shape, rows.dtype), "cursor": rows}
    back, saved_meta = checkpoints.restore(1, like)
    np.testing.assert_array_equal(back["w"], rows)
    np.testing.assert_array_equal(back["cursor"], rows)
    assert saved_meta == {"lines": [1]}


@pytest.mark.slow
def test_one_at_a_time_and_the_old_ones_stay_until_it_is_there(gate, tmp_path):
    state = {"w": np.arange(3)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        gate.set()
        checkpoints.save(1, state)
        checkpoints.wait()
        gate.clear()
        checkpoints.save(2, state)
        assert checkpoints.latest_step() == 1
        second = threading.Thread(target=checkpoints.save, args=(3, state))
        second.start()
        second.join(0.2)
        assert second.is_alive() and checkpoints.steps() == [1]
        gate.set()
        second.join(60)
    assert checkpoints.steps() == [3]


def test_a_wait_is_a_phase_that_the_watchdog_names(gate, tmp_path):
    record = progress.start()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": np.arange(3)})
    assert record.position().phase == "start"
    phases = []

    def look():
        while record.position().phase == "start":
            time.sleep(0.001)
        phases.append(record.position().phase)
        gate.set()

    looker = threading.Thread(target=look)
    looker.start()
    checkpoints.wait()
    looker.join()
    assert phases == ["checkpoint"]


def test_a_process_whose_own_part_is_written_waits_for_the_others(monkeypatch):
    """The watchdog then names the one that is still in the phase of the checkpoint."""
    monkeypatch.setattr(storage, "is_multiprocess", lambda: True)
    record, done = progress.start(), threading.Event()
    gather = BackgroundGather("test")
    save = storage.BackgroundSave(lambda: done.wait(60) and None, gather)
    result = []

    def look():
        for phase, event in (("checkpoint", gather.waits), ("agreement", done)):
            deadline = time.monotonic() + 60
            while record.position().phase != phase and time.monotonic() < deadline:
                time.sleep(0.001)
            result.append((record.position().phase, record.position().agreements))
            event.set()

    looker = threading.Thread(target=look)
    looker.start()
    save.wait()
    looker.join()
    assert result == [("checkpoint", 0), ("agreement", 1)]


@pytest.mark.parametrize("error", [None, KeyError("of the block")])
def test_the_end_of_a_block_completes_the_save(error, tmp_path):
    try:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"w": np.arange(3)})
            if error is not None:
                raise error
    except KeyError as raised:
        assert raised is error
    assert Checkpoints(tmp_path).latest_valid_step() == (1, {})


def test_the_error_of_the_block_goes_before_that_of_the_save(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_host_arrays", full)
    with pytest.raises(KeyError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.arange(3)})
        raise KeyError("of the block")
    line = capsys.readouterr().err
    assert line.startswith("warning: the last checkpoint was not completed: ")
    assert "No space left on device: free space on that disk" in line and line.count("\n") == 1


@pytest.mark.parametrize("copies", [True, False])
def test_arrays_are_copied_unless_they_stay(tmp_path, monkeypatch, copies):
    stored, write, array = [], module._write_host_arrays, np.arange(8.0)

    def watched(path, items):
        stored.append(items["state"].item["w"])
        write(path, items)

    monkeypatch.setattr(module, "_write_host_arrays", watched)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": array}, copy_arrays=copies)
    assert np.shares_memory(stored[0], array) != copies
    restored, _ = Checkpoints(tmp_path).restore(None, like={"w": array})
    np.testing.assert_array_equal(restored["w"], array)


@pytest.mark.slow
def test_a_copy_of_the_state_is_kept_no_longer_than_the_write(tmp_path):
    class Watched(np.ndarray):
        pass

    copies, copy = [], module._on_host

    def watched(array, has_copies):
        host = copy(array, has_copies).view(Watched)
        copies.append(weakref.ref(host))
        return host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_on_host", watched)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"w": jnp.arange(3)})
        assert checkpoints._in_flight is not None
        checkpoints._in_flight._thread.join()
    gc.collect()
    assert [copy() for copy in copies] == [None]


# Saves step 2 so slowly that it is in flight when the process is killed, and goes on meanwhile.
KILLED = """
import os, signal, sys, time, jax.numpy as jnp
from jrl.runs import checkpoints as module, manifest
write, hashed = module._write_host_arrays, manifest._size_and_hash
moment = sys.argv[2]
checkpoints = module.Checkpoints(sys.argv[1], keep=1)
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
state = {"w": jnp.arange(1000)}
checkpoints.save(1, state)
checkpoints.wait()
if moment == "before":
    module._write_host_arrays = kill
elif moment == "written":
    module._write_host_arrays = lambda *given: (write(*given), kill())
elif moment == "hashing":
    manifest._size_and_hash = kill
else:
    checkpoints._delete = kill
checkpoints.save(2, {"w": jnp.arange(1000) + 1})
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "step"), [("before", 1), ("written", 1), ("hashing", 1), ("renamed", 2)]
)
def test_a_kill_in_flight_leaves_the_one_before_or_the_whole_one(moment, step, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), moment], capture_output=True, timeout=600
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest_valid_step() == (step, {})
    back, _ = checkpoints.restore(None, {"w": jnp.zeros(1000, int)})
    np.testing.assert_array_equal(back["w"], np.arange(1000) + step - 1)
    checkpoints.save(3, back)
    checkpoints.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["3"]
