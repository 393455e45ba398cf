"""Launch over Kubernetes: a JobSet of one pod for each machine, restarted as a whole at a failure.

The pods reach each other by the names that JobSet gives them, so that none needs a service account
that may read pods, as for JAX's own detection of Kubernetes. GKE describes a TPU slice to JAX.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jrl.launch.program import MODULE

JOB = "workers"
"""Name of the job in the JobSet."""
WRONG_INPUT = 2
"""Exit status that no restart mends."""
PROBE_SECONDS, START_SECONDS = 10, 900
"""Seconds between health checks, and until the first has to succeed."""
GRACE_SECONDS = 120
"""Seconds that a pod may save after SIGTERM."""


@dataclass(frozen=True)
class JobSet:
    """Settings of a JobSet: options of ``python -m jrl.launch --jobset``.

    Attributes:
      name: name of the JobSet, a DNS label.
      gpus, chips: of each node; None is none.
      volume: a volume claim that all pods share, and its mount path.
      environment: variables of the processes.
    """

    name: str
    image: str
    nodes: int
    volume: tuple[str, str]
    gpus: int | None = None
    chips: int | None = None
    accelerator_type: str | None = None
    topology: str | None = None
    port: int = 7733
    max_failures: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise ValueError(
                f"job_name={self.name!r} must be at most 40 lower-case letters, digits and hyphens."
            )
        described = (self.chips, self.accelerator_type, self.topology)
        if any(described) and not all(described):
            raise ValueError(
                "a TPU slice needs --chips (of each node), --accelerator-type and --topology."
            )
        if self.chips and self.gpus:
            raise ValueError(f"gpus={self.gpus}, chips={self.chips}: a pod has GPUs or TPU chips.")


def parse_volume(text: str) -> tuple[str, str]:
    """Claim and mount path from CLAIM:PATH, for example runs:/mnt/runs."""
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise ValueError(f"volume={text!r} must be CLAIM:PATH, with an absolute path.")
    return claim, path


def arguments_of(words: Sequence[str], volume: tuple[str, str]) -> list[str]:
    """Arguments of the training program; ValueError where its run folder is not on the volume, and
    for drains, whose machine JobSet would not leave out."""
    joined = " ".join(words)
    if re.search(r"--on[-_]fault[ =]drain( |$)", joined):
        raise ValueError(
            "on_fault='drain' is not supported with --jobset, which would restart the run on the "
            "same machines: use a command as --on-fault that takes the machine out of service."
        )
    match = re.search(r"--run[-_]dir[ =](\S+)", joined)
    if match is None or not Path(match[1]).is_relative_to(volume[1]):
        raise ValueError(
            f"--jobset needs --run-dir after --, a folder on the volume in {volume[1]}, which all "
            "pods share and which a restart continues."
        )
    return [*(word for word in words if word != "--resume"), "--resume-if-exists"]


def manifest(job: JobSet, arguments: Sequence[str]) -> dict[str, Any]:
    """The JobSet as JSON values."""
    processes = ["--coordinator", "auto"]
    if job.chips is None:
        # JobSet's name of the first pod, and the index that Kubernetes gives each.
        processes = [
            *("--coordinator", f"{job.name}-{JOB}-0-0.{job.name}:{job.port}"),
            *("--num-processes", str(job.nodes), "--process-id", "$(JOB_COMPLETION_INDEX)"),
        ]
    limits: dict[str, str] = {}  # quantities are texts
    if job.gpus is not None:
        limits["nvidia.com/gpu"] = str(job.gpus)
    if job.chips is not None:
        limits["google.com/tpu"] = str(job.chips)
    line = " ".join(arguments)
    match = re.search(r"--metrics[-_]port[ =](\d+)", line)
    # The probe comes from the node, not from the pod.
    reachable = match is None or re.search(r"--metrics[-_]address", line) is not None
    address = [] if reachable else ["--metrics-address", "0.0.0.0"]
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        # Kubernetes reads $(NAME) in arguments as a variable, and $$ as a dollar sign.
        "command": [
            *("python", "-m", MODULE),
            *(word.replace("$", "$$") for word in arguments),
            *address,
            *processes,
        ],
        "ports": [{"containerPort": job.port}],
        "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "runs", "mountPath": job.volume[1]},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if match is not None:
        check = {
            "httpGet": {"path": "/health", "port": int(match[1])},
            "periodSeconds": PROBE_SECONDS,
        }
        container["startupProbe"] = check | {"failureThreshold": START_SECONDS // PROBE_SECONDS}
        container["livenessProbe"] = check | {"failureThreshold": 3}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.volume[0]}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # for NCCL
        ],
    }
    if job.chips is not None:
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": job.accelerator_type,
            "cloud.google.com/gke-tpu-topology": job.topology,
        }
    fail = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [WRONG_INPUT]}}
    template = {
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": 0,  # a pod alone cannot join a run that is going on
            "podFailurePolicy": {"rules": [fail]},
            "template": {"spec": pod},
        }
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.max_failures,
                "rules": [
                    {
                        "name": "wrongInput",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": template}],
        },
    }


def write(job: JobSet, arguments: Sequence[str], path: Path) -> int:
    """Writes the JobSet as YAML, and returns the exit status."""
    text = yaml.safe_dump(manifest(job, arguments), sort_keys=False, width=1000)
    path.write_text(text)
    print(f"wrote {path}; submit it with: kubectl apply -f {path}")
    return 0
