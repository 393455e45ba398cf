"""Launch over Ray: its plan for a cluster, and two workers on a cluster of this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from command_runs import metrics
from compiling import FLAGS as UNOPTIMISED
from places import ROOT

from jrl.launch.ray_cluster import (
    Accelerators,
    RayOptions,
    accelerators,
    scaling_settings,
    worker_environment,
)


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


def test_accelerators_of_a_cluster_are_counted():
    assert accelerators([node(CPU=8.0)]) == Accelerators("CPU", 1, 8)
    head = node(CPU=4.0)
    machines = [node(CPU=96.0, GPU=8.0), node(CPU=96.0, GPU=4.0), node(alive=False, GPU=1.0)]
    assert accelerators([head, *machines]) == Accelerators("GPU", 2, 4)
    assert accelerators([head, node(CPU=96.0, TPU=4.0)]) == Accelerators("TPU", 1, 4)
    with pytest.raises(ValueError, match="no node with a CPU, GPU or TPU"):
        accelerators([node(memory=1e9)])


def test_a_process_has_all_gpus_of_its_node():
    gpus = Accelerators("GPU", 2, 8)
    assert scaling_settings(RayOptions(), gpus) == {
        "num_workers": 2,
        "use_gpu": True,
        "resources_per_worker": {"GPU": 8},
        "placement_strategy": "STRICT_SPREAD",
    }
    with pytest.raises(ValueError, match=r"workers=3: .* has 2 nodes with GPUs"):
        scaling_settings(RayOptions(workers=3), gpus)


def test_elastic_runs_have_a_range_of_workers():
    gpus, tpus = Accelerators("GPU", 4, 8), Accelerators("TPU", 4, 4)
    assert scaling_settings(RayOptions(elastic=2), gpus)["num_workers"] == (2, 4)
    cpus = Accelerators("CPU", 1, 8)
    assert scaling_settings(RayOptions(workers=3, elastic=1), cpus)["num_workers"] == (1, 3)
    with pytest.raises(ValueError, match="elastic=5 is more than the 4 workers"):
        scaling_settings(RayOptions(elastic=5), gpus)
    options = RayOptions(topology="4x4", accelerator_type="TPU-V6E", elastic=2)
    with pytest.raises(ValueError, match="elastic=2: a TPU slice loses all its nodes together"):
        scaling_settings(options, tpus)


def test_a_tpu_slice_is_described():
    tpus = Accelerators("TPU", 4, 4)
    options = RayOptions(topology="4x4", accelerator_type="TPU-V6E")
    settings = scaling_settings(options, tpus)
    assert settings["use_tpu"] and settings["topology"] == "4x4" and settings["num_workers"] == 4
    with pytest.raises(ValueError, match="--topology, such as 4x4"):
        scaling_settings(RayOptions(), tpus)


def test_workers_on_cpus_are_connected():
    """Ray connects no workers unless it is told of an accelerator or of JAX_PLATFORMS."""
    assert worker_environment("CPU")["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in worker_environment("GPU")


SETTINGS = {
    "layout": "dp2",
    "devices": 2,
    "steps": 4,
    "warm-start-steps": 0,
    "warm-start-batch": 4,
    "prompts": 4,
    "group-size": 2,
    "mini-batch": 8,
    "eval-prompts": 4,
    "checkpoint-every": 1,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


def start(folder, *words):
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def wait_for(condition, process):
    deadline = time.monotonic() + 500
    while not (result := condition()):
        assert process.poll() is None, "the launch has ended"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return result


@needs_ray
@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_make_the_run_of_one_process(tmp_path):
    launch = ["-m", "jrl.launch", "--ray", "--workers=2", "--max-failures=1", "--"]
    launched = start(tmp_path, *launch, *FLAGS, "--run-dir=two")
    try:
        lines = tmp_path / "two" / "metrics.jsonl"
        wait_for(lambda: lines.exists() and len(lines.read_text().splitlines()) > 2, launched)
        result = re.findall(r"pid=(\d+)\) world_rank=1", (tmp_path / "errors").read_text())
        os.kill(int(result[-1]), signal.SIGKILL)
        output, _ = launched.communicate(timeout=400)
    finally:
        launched.terminate()
        launched.wait(60)
    errors = (tmp_path / "errors").read_text()
    assert launched.returncode == 0, errors[-3000:]
    assert len(set(re.findall(r"pid=(\d+)\) world_rank=1", errors))) == 2, errors[-3000:]
    assert output.count("completed step: 4/4") == 1
    single = start(tmp_path, "-m", "jrl.train", *FLAGS, "--run-dir=one")
    single.communicate(timeout=400)
    assert single.returncode == 0
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert len(metrics(tmp_path / "two")) == 1 + SETTINGS["steps"]


CLUSTER = """
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
lost = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
input()
cluster.remove_node(lost, allow_graceful=False)
input()
cluster.shutdown()
"""
"""Two nodes on this machine, of which the second is lost at a line of standard input."""


@needs_ray
@pytest.mark.slow
def test_a_run_that_loses_a_node_continues_on_the_other(tmp_path):
    pipe = subprocess.PIPE
    # Not in this process, where Ray's forks would be warned of.
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        address = next(line for line in cluster.stdout if re.fullmatch(r"[\d.]+:\d+\n", line))
        launch = ["-m", "jrl.launch", f"--ray={address.strip()}", "--elastic=1"]
        compile_quickly = f"--env=XLA_FLAGS={' '.join(UNOPTIMISED)}"
        # A device of each process, so that the layout has to change.
        flags = [flag for flag in FLAGS if not flag.startswith(("--devices", "--steps"))]
        launched = start(
            tmp_path, *launch, compile_quickly, "--", *flags, "--steps=8", "--run-dir=two"
        )
        try:
            lines = tmp_path / "two" / "metrics.jsonl"
            wait_for(lambda: lines.exists() and len(lines.read_text().splitlines()) > 2, launched)
            cluster.stdin.write("\n")
            cluster.stdin.flush()
            output, _ = launched.communicate(timeout=500)
        finally:
            launched.terminate()
            launched.wait(60)
            cluster.stdin.write("\n\n")
    errors = (tmp_path / "errors").read_text()
    assert launched.returncode == 0, errors[-3000:]
    dp1 = "tp1 cp1 dp1 pp1 / ep1 etp1 edp1"
    line = f"layout {dp1!r} in place of 'dp2': there are 1 of 2 devices"
    assert output.count(line) == 1, output[-3000:]
    assert output.count("completed step: 8/8") == 1
    assert [line["step"] for line in metrics(tmp_path / "two")] == list(range(9))


@needs_ray
@pytest.mark.slow
def test_wrong_input_is_not_repeated(tmp_path):
    """Arguments that all workers reject end the command and are not retried."""
    launch = ["-m", "jrl.launch", "--ray", "--workers=2", "--", "--devices=2", "--layout=dp4"]
    launched = start(tmp_path, *launch, "--run-dir=two")
    try:
        launched.communicate(timeout=400)
    finally:
        launched.terminate()
        launched.wait(60)
    errors = (tmp_path / "errors").read_text()
    assert launched.returncode == 2, errors[-3000:]
    assert "error: layout 'dp4' needs 4 devices and there are 2" in errors
    assert errors.count("world_rank=1") == 1
