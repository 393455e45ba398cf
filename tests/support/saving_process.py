"""One of two processes that save checkpoints together, and what it makes of them, as JSON.

python saving_process.py PORT NUMBER FOLDER ADDRESS

ADDRESS is of a directory in a bucket.
"""

import json
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.command_line import start_jax
from jrl.processes.agreement import any_of, to_devices, to_host
from jrl.processes.coordinator import Processes, ProcessFailed
from jrl.runs import manifest
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.storage import StorageError

DEVICES, ROWS = 4, 4096


def said(function) -> str:
    """Message of the exception that the function raises."""
    try:
        function()
    except (StorageError, ProcessFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(port: int, number: int, folder: Path, address: str) -> None:
    start_jax(DEVICES, Processes(f"localhost:{port}", num_processes=2, process_id=number))
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, full = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["x"], []))
    rows = np.random.default_rng(0).normal(size=(ROWS, 64)).astype(np.float32)
    state = {"rows": to_devices(rows, spread), "sum": to_devices(rows[:8], full)}

    def next_state(state):
        rows = state["rows"] + 1
        return {"rows": rows, "sum": state["sum"] + rows.sum()}  # a sum over both processes

    update = jax.jit(next_state, donate_argnums=0, out_shardings={"rows": spread, "sum": full})
    expected, checkpoints = {}, Checkpoints(folder / "checkpoints", keep=2)
    for step in range(1, 4):
        expected[step] = to_host(state)
        checkpoints.save(step, state, {"step": step})
        for _ in range(20):  # collectives of devices beside the threads that write
            state = update(state)
        jax.block_until_ready(state)
    checkpoints.wait()
    like = {"rows": jax.ShapeDtypeStruct((ROWS, 64), jnp.float32, sharding=spread)}
    like["sum"] = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=full)
    results: dict = {"steps": checkpoints.steps()}
    for step in results["steps"]:
        back, meta = checkpoints.restore(step, like)
        same = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), to_host(back), expected[step])
        results[f"same {step}"] = [*same.values(), meta == {"step": step}]

    in_bucket = Checkpoints(address)
    for step in (1, 2):
        in_bucket.save(step, state, {"step": step})
        in_bucket.wait()
    if number == 0:
        (in_bucket.directory / "2" / "meta" / "metadata").write_text("{}")
    any_of(False)
    results["in bucket"] = list(Checkpoints(address).latest_valid_step())
    back, meta = in_bucket.restore(1, like)
    same = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), to_host(back), to_host(state))
    results["same in bucket"] = [*same.values(), meta == {"step": 1}]

    # The disk of the second process is full, and then files cannot be read back.
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if number == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit))
    checkpoints.save(4, state)
    results["full"] = said(checkpoints.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpoints.save(4, state)
    results["again"] = said(checkpoints.wait)

    hashed = manifest._size_and_hash

    def unreadable(path):
        raise OSError(5, "Input/output error", str(path))

    manifest._size_and_hash = unreadable if number == 1 else hashed
    checkpoints.save(5, state)
    manifest_read = said(lambda: checkpoints.save(6, state))
    manifest._size_and_hash = hashed
    results["unreadable"] = manifest_read
    results["intact"] = list(checkpoints.latest_valid_step())

    # One process has an error of its own while the other has not begun.
    any_of(False)
    try:
        with Checkpoints(folder / "checkpoints") as checkpoints:
            if number == 1:
                manifest._size_and_hash = lambda path: time.sleep(12) or hashed(path)
            checkpoints.save(7, state)
            if number == 0:
                time.sleep(3)  # both are past Orbax
                raise KeyError("of the block")
    except (KeyError, ProcessFailed) as error:
        results["left"] = type(error).__name__
    (folder / f"{number}.json").write_text(json.dumps(results))
    any_of(False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
