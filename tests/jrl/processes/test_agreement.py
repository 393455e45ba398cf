import json
import os
import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from places import ROOT, SUPPORT

from jrl.processes.agreement import (
    RaiseInAllProcesses,
    any_of,
    broadcast_from_main,
    check_same,
    gather,
    is_main_process,
    is_multiprocess,
    to_devices,
    to_host,
)


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """What two processes made of what they gave each other."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = tmp_path_factory.mktemp("agreed")
    command = [sys.executable, str(SUPPORT / "agreeing_process.py"), port]
    processes = [
        subprocess.Popen(
            [*command, number, str(folder / number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors[-2000:]
    assert [output for output, _ in ends] == ["only the first process is heard\n", ""]
    return [json.loads((folder / number).read_text()) for number in "01"]


@pytest.mark.slow
def test_each_holds_its_part_and_both_see_the_whole(agreed):
    for each in agreed:
        assert each["held"] == 6  # of 12
        assert each["spread"] and each["whole"] and each["numpy"]
        assert each["of the second"] == {"rows": True, "flags": True}
    assert [each["own"] for each in agreed] == [[0, 0, 0], [1, 1, 1]]
    assert [each["first"] for each in agreed] == [True, False]


@pytest.mark.slow
def test_collectives_agree_on_differing_values(agreed):
    for each in agreed:
        assert each["from first"] == {"number": 0, "text": "ééé"}
        assert each["gathered"] == [[], ["x"] * 20]
        assert each["any"] == [False, True, True, True]


@pytest.mark.slow
def test_processes_of_different_runs_are_refused(agreed):
    for each in agreed:
        assert each["same"] == "nothing"
        assert each["different"] == (
            "process 1 was started for another run than process 0: --steps is 4 there and 3 in "
            "process 0. Start all processes with the same flags except --process-id."
        )


@pytest.mark.slow
def test_raise_in_all_processes_raises_in_both(agreed):
    wrong = [f"it went wrong in {number}" for number in range(2)]
    other = [f"process {number}: {line}" for number, line in enumerate(wrong)]
    assert agreed[0]["failed"] == ["nothing", wrong[0], other[1], wrong[0]]
    assert agreed[1]["failed"] == ["nothing", other[0], wrong[1], wrong[1]]


def test_collectives_of_one_process_return_their_argument():
    assert is_main_process() and not is_multiprocess()
    value = {"a": (1, 2)}
    assert broadcast_from_main(value) is value
    assert gather(value)[0] is value
    assert (any_of(False), any_of(True)) == (False, True)
    check_same({"--steps": object()})
    with pytest.raises(KeyError, match="a"), RaiseInAllProcesses():
        raise KeyError("a")


def test_one_process_moves_arrays_as_jax_does():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    tree = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": jnp.ones(4, bool), "c": None}
    placed = to_devices(tree, sharding)
    assert jax.tree.all(jax.tree.map(lambda x: x.sharding == sharding, placed))
    host = to_host(placed)
    assert jax.tree.all(jax.tree.map(lambda x: isinstance(x, np.ndarray), host))
    chex.assert_trees_all_equal(host, tree)
