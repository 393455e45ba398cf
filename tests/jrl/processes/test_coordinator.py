import socket
import time

import pytest

from jrl.command_line import start_jax
from jrl.processes import coordinator
from jrl.processes.coordinator import Processes, join_processes


def test_one_process_joins_nothing():
    Processes().check()
    assert Processes().share(None) is None
    assert Processes().share(3) == 3
    join_processes(Processes())


def test_devices_are_shared_evenly():
    two = Processes("localhost:7733", num_processes=2, process_id=1)
    two.check()
    assert two.share(6) == 3
    assert two.share(None) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_processes": 2}, r"num_processes=2, process_id=None need --coordinator HOST:PORT"),
        ({"process_id": 0}, r"num_processes=None, process_id=0 need --coordinator HOST:PORT"),
        ({"coordinator": "host"}, r"coordinator='host' must be HOST:PORT with a port in 1..65535"),
        ({"coordinator": "host:"}, r"coordinator='host:' must be HOST:PORT"),
        ({"coordinator": ":7733"}, r"coordinator=':7733' must be HOST:PORT"),
        ({"coordinator": "host:65536"}, r"coordinator='host:65536' must be HOST:PORT"),
        ({"coordinator": "host:0"}, r"coordinator='host:0' must be HOST:PORT"),
        ({"coordinator": "host:7733"}, r"'host:7733' needs --num-processes and --process-id"),
        (
            {"coordinator": "host:7733", "num_processes": 2},
            r"'host:7733' needs --num-processes and --process-id",
        ),
        (
            {"coordinator": "host:7733", "num_processes": 0, "process_id": 0},
            r"num_processes=0 must be at least 1",
        ),
        (
            {"coordinator": "host:7733", "num_processes": 2, "process_id": 2},
            r"process_id=2 must lie in 0\.\.1",
        ),
        (
            {"coordinator": "host:7733", "num_processes": 2, "process_id": -1},
            r"process_id=-1 must lie in 0\.\.1",
        ),
        (
            {
                "coordinator": "host:7733",
                "num_processes": 2,
                "process_id": 1,
                "coordinator_timeout": 0,
            },
            r"coordinator_timeout=0 must be at least 1 second",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        start_jax(None, Processes(**settings))


def test_devices_that_cannot_be_shared_are_refused():
    three = Processes("localhost:7733", num_processes=3, process_id=0)
    with pytest.raises(ValueError, match=r"devices=4 cannot be shared by num_processes=3"):
        start_jax(4, three)
    with pytest.raises(
        ValueError, match=r"devices=4 over multiple processes needs --num-processes"
    ):
        start_jax(4, Processes("auto"))


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"process 0 cannot listen there .*another port"):
            join_processes(Processes(address, num_processes=2, process_id=0))


def test_a_coordinator_that_does_not_answer_is_given_up():
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"does not answer within 1 s .*: start process 0"):
        join_processes(Processes(address, num_processes=2, process_id=1, coordinator_timeout=1))
    assert 1 <= time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, r"finds no cluster that JAX supports .*: give --coordinator HOST:PORT"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            r"needs the package kubernetes here: pip install 'jax\[k8s\]', and give the pods a "
            r"service account that may read pods",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},
            r"SLURM_STEP_NODELIST, SLURM_PROCID, SLURM_LOCALID missing, which srun sets",
        ),
    ],
)
def test_a_cluster_that_is_not_detected_is_one_line(variables, message, monkeypatch):
    for name in ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", *coordinator.SLURM_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def initialize(*arguments, **settings):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(coordinator.jax.distributed, "initialize", initialize)
    monkeypatch.setattr(coordinator, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        join_processes(Processes("auto"))


def test_a_service_account_without_rights_is_one_line(monkeypatch):
    def initialize(*arguments, **settings):
        raise RuntimeError("Kubernetes API Error: 403 - Forbidden\nIt appears that ...")

    monkeypatch.setattr(coordinator.jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=r"403 - Forbidden: give the pods a service account"):
        join_processes(Processes("auto"))
