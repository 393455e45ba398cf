"""Launch over Kubernetes: the manifest, field by field as JobSet, Job and Pod have them."""

import re

import pytest
import yaml

from jrl.launch import jobset
from jrl.launch.jobset import JobSet, arguments_of, manifest, parse_volume

# The fields that the manifest uses, with their types; "required" ones are marked by a star. From
# the API references of jobset.x-k8s.io/v1alpha2, batch/v1 and core/v1.
PROBE = {
    "httpGet": {"path": str, "port*": int},
    "periodSeconds": int,
    "failureThreshold": int,
}
CONTAINER = {
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "name*": str,
    "image*": str,
    "command": [str],
    "ports": [{"containerPort*": int}],
    "env": [{"name*": str, "value": str}],
    "resources": {"limits": {"nvidia.com/gpu": str, "google.com/tpu": str}},
    "volumeMounts": [{"name*": str, "mountPath*": str}],
}
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {
        "cloud.google.com/gke-tpu-accelerator": str,
        "cloud.google.com/gke-tpu-topology": str,
    },
    "containers*": [CONTAINER],
    "volumes": [
        {
            "name*": str,
            "persistentVolumeClaim": {"claimName*": str},
            "emptyDir": {"medium": str},
        }
    ],
}
JOB = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules*": [{"action*": str, "onExitCodes": {"operator*": str, "values*": [int]}}]
    },
    "template*": {"spec*": POD},
}
SCHEMA = {
    "apiVersion*": str,
    "kind*": str,
    "metadata*": {"name*": str},
    "spec*": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name*": str, "action*": str, "onJobFailureReasons": [str]}],
        },
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "replicatedJobs": [{"name*": str, "replicas": int, "template*": {"spec*": JOB}}],
    },
}
ARGUMENTS = ["dapo", "--task", "jsonl:$(HOME)/a b.jsonl", "--run-dir", "/runs/first"]


def check(value, schema, path="JobSet"):
    if isinstance(schema, type):
        assert type(value) is schema, f"{path} is {value!r}"
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for index, item in enumerate(value):
            check(item, schema[0], f"{path}[{index}]")
    else:
        kinds = {name.rstrip("*"): kind for name, kind in schema.items()}
        assert value.keys() <= kinds.keys(), path
        assert {name[:-1] for name in schema if name.endswith("*")} <= value.keys(), path
        for name, item in value.items():
            check(item, kinds[name], f"{path}.{name}")


def written(tmp_path, **settings):
    job = JobSet("jrl", "registry/jrl:1", 4, ("claim", "/runs"), **settings)
    path = tmp_path / "jobset.yaml"
    assert jobset.write(job, arguments_of(ARGUMENTS, job.volume), path) == 0
    value = yaml.safe_load(path.read_text())
    check(value, SCHEMA)
    return value


def pod_of(value):
    return value["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_pods_with_gpus_know_each_other_by_name(tmp_path):
    value = written(tmp_path, gpus=8, environment={"NCCL_DEBUG": "INFO"})
    job = value["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    [container] = pod_of(value)["containers"]
    assert container["command"] == [
        *("python", "-m", "jrl.train", "dapo", "--task", "jsonl:$$(HOME)/a b.jsonl"),
        *("--run-dir", "/runs/first", "--resume-if-exists"),
        *("--coordinator", "jrl-workers-0-0.jrl:7733", "--num-processes", "4"),
        *("--process-id", "$(JOB_COMPLETION_INDEX)"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
    assert "nodeSelector" not in pod_of(value)


def test_a_run_with_a_health_check_is_probed():
    job = JobSet("jrl", "image", 2, ("claim", "/runs"))
    everywhere = ["--metrics-address", "0.0.0.0"]
    for flag, address in (
        (["--metrics-port", "9400"], everywhere),
        (["--metrics_port=9400"], everywhere),
        (["--metrics-port=9400", "--metrics-address", "::"], ["--metrics-address", "::"]),
    ):
        value = manifest(job, [*ARGUMENTS, *flag])
        check(value, SCHEMA)
        [container] = pod_of(value)["containers"]
        at = container["command"].index("--metrics-address")
        assert container["command"][at : at + 2] == address
        assert container["command"].count("--metrics-address") == 1
        for name, failures in (("startupProbe", 90), ("livenessProbe", 3)):
            assert container[name] == {
                "httpGet": {"path": "/health", "port": 9400},
                "periodSeconds": 10,
                "failureThreshold": failures,
            }
    [container] = pod_of(manifest(job, ARGUMENTS))["containers"]
    assert "livenessProbe" not in container and "--metrics-address" not in container["command"]


def test_pods_of_a_tpu_slice_are_placed_by_gke(tmp_path):
    value = written(tmp_path, chips=4, accelerator_type="tpu-v6e-slice", topology="4x4")
    pod = pod_of(value)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    [container] = pod["containers"]
    assert container["command"][-2:] == ["--coordinator", "auto"]
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}


def test_a_failure_restarts_all_pods_and_wrong_input_none(tmp_path):
    value = written(tmp_path, max_failures=7)
    assert value["spec"]["failurePolicy"]["maxRestarts"] == 7
    [rule] = value["spec"]["failurePolicy"]["rules"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = value["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    assert pod_of(value)["restartPolicy"] == "Never"  # which podFailurePolicy needs


def test_the_run_folder_is_on_the_volume():
    assert parse_volume("claim:/runs") == ("claim", "/runs")
    for text in ("claim", "claim:runs", ":/runs"):
        with pytest.raises(ValueError, match="must be CLAIM:PATH"):
            parse_volume(text)
    for words in (["dapo"], ["--run-dir", "runs/first"], ["--run-dir=/other/first"]):
        with pytest.raises(ValueError, match="needs --run-dir after --"):
            arguments_of(words, ("claim", "/runs"))
    words = ["--resume", "--run_dir=/runs/a"]
    assert arguments_of(words, ("claim", "/runs")) == ["--run_dir=/runs/a", "--resume-if-exists"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "Jrl"}, "job_name='Jrl' must be"),
        ({"chips": 4}, "a TPU slice needs --chips"),
        ({"topology": "4x4"}, "a TPU slice needs --chips"),
        (
            {"chips": 4, "gpus": 8, "accelerator_type": "x", "topology": "4x4"},
            "gpus=8, chips=4",
        ),
    ],
)
def test_jobset_refuses_unsupported_input(settings, message):
    base = {"name": "jrl", "image": "image", "nodes": 1, "volume": ("claim", "/runs")}
    with pytest.raises(ValueError, match=message):
        JobSet(**{**base, **settings})


def test_jobset_schema_rejects_unknown_fields():
    value = manifest(JobSet("jrl", "image", 1, ("claim", "/runs")), ARGUMENTS)
    value["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError, match=r"JobSet\.spec\.failurePolicy"):
        check(value, SCHEMA)
