"""One of two processes that agree on things, and what it makes of them, as a file of JSON.

python agreeing_process.py PORT NUMBER FILE
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.command_line import start_jax
from jrl.processes.agreement import (
    RaiseInAllProcesses,
    any_of,
    broadcast_from_main,
    check_same,
    connect,
    gather,
    is_main_process,
    to_devices,
    to_every_host,
    to_host,
)
from jrl.processes.coordinator import Processes
from sharding.folding import Layout, fold

DEVICES = 4


def said(function) -> str:
    """Message of the exception that the function raises."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing"


def fail(numbers: tuple[int, ...]) -> None:
    with RaiseInAllProcesses():
        if jax.process_index() in numbers:
            raise ValueError(f"it went wrong in {jax.process_index()}")


def main(port: int, number: int, file: str) -> None:
    start_jax(DEVICES, Processes(f"localhost:{port}", num_processes=2, process_id=number))
    connect(fold(Layout.parse("tp2 dp2 / ep4")))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    spread, full = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["x"], []))
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
    tree = {
        "spread": to_devices(rows, spread),
        "whole": to_devices(rows[:2] + 1, full),
        "own": jax.numpy.full((2,), number),
        "host": np.full((1,), number),
    }
    result = to_host(tree)
    second = fold(Layout.parse("dp2"), jax.devices()[2:])
    theirs = {"rows": -rows * (rows > 1), "flags": rows > 1}
    place = NamedSharding(second.mesh, PartitionSpec(second.dp))
    received = to_every_host(to_devices(theirs, place), second)
    results = {
        "first": is_main_process(),
        "held": sum(shard.data.size for shard in tree["spread"].addressable_shards),
        "spread": bool(np.array_equal(result["spread"], rows)),
        "whole": bool(np.array_equal(result["whole"], rows[:2] + 1)),
        "of the second": {
            name: theirs[name].tobytes() == received[name].tobytes() for name in theirs
        },
        "own": result["own"].tolist() + result["host"].tolist(),
        "numpy": all(isinstance(leaf, np.ndarray) for leaf in result.values()),
        "from first": broadcast_from_main({"number": number, "text": "é" * (3 + 50 * number)}),
        "gathered": gather(["x"] * 20 * number),
        "any": [any_of(False), any_of(number == 1), any_of(number == 0), any_of(True)],
        "same": said(lambda: check_same({"--steps": 3})),
        "different": said(lambda: check_same({"--steps": 3 + number, "--seed": 0})),
        "failed": [said(lambda n=n: fail(n)) for n in ((), (0,), (1,), (0, 1))],
    }
    print("only the first process is heard")
    Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
