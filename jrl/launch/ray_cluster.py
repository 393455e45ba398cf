"""Launch over Ray: Ray Train's JaxTrainer starts, watches and restarts the processes of a run.

`train` is the training program in a worker, after Ray has connected the processes.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jrl.checks import import_extra
from jrl.launch.program import Program
from jrl.processes.coordinator import all_arrive
from jrl.processes.stopping import Supervisor

END_SECONDS = 30.0
"""Seconds that a process which rejects its arguments waits for the others to reject them too."""


class RaySupervisor(Supervisor):
    """Reports steps to Ray Train, and asks it whether a node is about to be taken back."""

    def __init__(self) -> None:
        self._saved_for: frozenset[str] = frozenset()

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> bool:
        import ray.train

        ray.train.report({"step": step, **metrics})
        info = ray.train.get_preemption_info()
        if info is None:
            return False
        # One checkpoint for each node: training goes on until Ray restarts it.
        nodes = frozenset(info.preempted_node_ids)
        is_new = not nodes <= self._saved_for
        self._saved_for |= nodes
        return is_new


def train(config: Mapping[str, Any]) -> int:
    """Trains in this process, and returns the exit status; RuntimeError if the run failed.

    Ray restarts all workers if one raises. Status 2, wrong input, comes again at every restart, and
    is returned if all processes have it.
    """
    os.chdir(config["working_directory"])
    from jrl import train as program

    status = program.main(config["arguments"], RaySupervisor())
    if status == 0 or (status == 2 and all_arrive("wrong input", END_SECONDS)):
        return status
    raise RuntimeError(f"the training program ended with status {status}")


ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclass(frozen=True)
class RayOptions:
    """Settings of a launch over Ray: options of ``python -m jrl.launch --ray``.

    Attributes:
      address: address of the cluster, for example "head:6379"; None is RAY_ADDRESS, or a cluster on
        this machine alone.
      workers: processes of the run; None is one for each node that has the accelerators, or CPUs.
      elastic: fewest processes with which it is restarted where nodes are lost; None waits for all.
      environment: variables of the processes.
    """

    address: str | None = None
    workers: int | None = None
    elastic: int | None = None
    max_failures: int = 3
    topology: str | None = None
    accelerator_type: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Accelerators:
    """Accelerators of a cluster's nodes: kind ("CPU", "GPU" or "TPU"), nodes that have them, and
    how many of them each node has at least."""

    kind: str
    nodes: int
    per_node: int


def launch(program: Program, options: RayOptions) -> int:
    """Runs the program on a Ray cluster, and returns its exit status; ValueError where Ray is not
    installed or not reached, or the cluster lacks nodes."""
    ray = import_extra("ray", "ray", "--ray")
    address = options.address or os.environ.get(ADDRESS_VARIABLE)
    try:
        if address is None:
            print("starting Ray on this machine, which takes a minute", flush=True)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", include_dashboard=False)
        else:
            ray.init(address=address)
    except ConnectionError as error:
        line = " ".join(str(error).split())
        raise ValueError(f"no Ray cluster answers at {address!r}: {line}") from error
    try:
        return _fit(program, options, accelerators(ray.nodes()))
    finally:
        ray.shutdown()


def accelerators(nodes: list[Mapping[str, Any]]) -> Accelerators:
    """Accelerators of the nodes that Ray lists: TPUs if there are any, else GPUs, else CPUs."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    for kind in ("TPU", "GPU", "CPU"):
        counts = [int(each[kind]) for each in resources if each.get(kind, 0) >= 1]
        if counts:
            return Accelerators(kind, len(counts), min(counts))
    raise ValueError("the Ray cluster has no node with a CPU, GPU or TPU.")


def scaling_settings(options: RayOptions, cluster: Accelerators) -> dict[str, Any]:
    """Arguments of Ray's ScalingConfig: one process per node with all its accelerators.
    ValueError where the cluster has too few nodes, or a TPU slice is not described or elastic."""
    workers = cluster.nodes if options.workers is None else options.workers
    num_workers: int | tuple[int, int] = workers
    if options.elastic is not None:
        if options.elastic > workers:
            raise ValueError(
                f"elastic={options.elastic} is more than the {workers} workers: lower it."
            )
        num_workers = (options.elastic, workers)
    if cluster.kind == "TPU":
        if options.elastic is not None:
            raise ValueError(
                f"elastic={options.elastic}: a TPU slice loses all its nodes together; leave out "
                "--elastic."
            )
        if options.topology is None or options.accelerator_type is None:
            raise ValueError(
                "the Ray cluster has TPUs: describe the slice with --topology, such as 4x4, and "
                "--accelerator-type, such as TPU-V6E."
            )
        return {
            "num_workers": num_workers,
            "use_tpu": True,
            "topology": options.topology,
            "accelerator_type": options.accelerator_type,
        }
    if cluster.kind == "GPU":
        if workers > cluster.nodes:
            raise ValueError(
                f"workers={workers}: a process has all GPUs of its node, and the Ray cluster has "
                f"{cluster.nodes} nodes with GPUs."
            )
        return {
            "num_workers": num_workers,
            "use_gpu": True,
            "resources_per_worker": {"GPU": cluster.per_node},
            "placement_strategy": "STRICT_SPREAD",
        }
    return {"num_workers": num_workers, "placement_strategy": "SPREAD"}


def worker_environment(kind: str) -> dict[str, str]:
    """Environment variables of the workers."""
    variables = {
        # Its handler of SIGTERM would replace Ray's own.
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",
        # Ray would send what a process prints past its standard output, muted in all processes but
        # the first.
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return variables | ({"JAX_PLATFORMS": "cpu"} if kind == "CPU" else {})


def _fit(program: Program, options: RayOptions, cluster: Accelerators) -> int:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    scaling = scaling_settings(options, cluster)
    trainer = JaxTrainer(
        train,
        train_loop_config={
            "arguments": list(program.arguments),
            "working_directory": str(Path.cwd()),
        },
        # Without either of the two Ray connects nothing, and each worker trains a run of its own;
        # on CPUs JAX_PLATFORMS decides.
        jax_config=JaxConfig(use_tpu=cluster.kind == "TPU", use_gpu=cluster.kind != "TPU"),
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            # A name of its own: Ray would continue an earlier launch of the same name.
            name=f"{program.run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            storage_path=str(program.run_dir.absolute().parent / "ray"),
            failure_config=FailureConfig(max_failures=options.max_failures),
            worker_runtime_env={
                "env_vars": worker_environment(cluster.kind) | dict(options.environment)
            },
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise LaunchFailed(
            f"the run failed after {options.max_failures} restarts; continue it with --resume "
            f"--run-dir {program.run_dir}: {lines[-1]}"
        ) from error
    return int(result.return_value)


class LaunchFailed(RuntimeError):
    """Raised if a run failed more often than it may be restarted."""
