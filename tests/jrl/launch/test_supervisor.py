"""Supervisor of a run: told of every step, and asked whether to save."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from command_runs import FLAGS, metrics

from jrl import train
from jrl.launch import ray_cluster
from jrl.launch.ray_cluster import RaySupervisor
from jrl.processes.stopping import Supervisor
from jrl.runs.checkpoints import Checkpoints


@pytest.fixture
def ray(monkeypatch):
    """Ray Train as a worker sees it: what was reported, and nodes that are taken back."""
    parent, module = ModuleType("ray"), ModuleType("ray.train")
    reported, nodes = [], []
    module.report = reported.append
    module.get_preemption_info = lambda: (
        SimpleNamespace(preempted_node_ids=list(nodes)) if nodes else None
    )
    parent.train = module
    monkeypatch.setitem(sys.modules, "ray", parent)
    monkeypatch.setitem(sys.modules, "ray.train", module)
    return SimpleNamespace(reported=reported, nodes=nodes)


def test_a_node_that_is_taken_back_asks_for_one_checkpoint(ray):
    supervisor = RaySupervisor()
    answers = [supervisor.step_ended(1, {"reward": 0.5})]
    for nodes in (["a"], ["a"], ["a", "b"], ["b"]):
        ray.nodes[:] = nodes
        answers.append(supervisor.step_ended(2, {}))
    assert answers == [False, True, False, True, False]
    assert ray.reported[:2] == [{"step": 1, "reward": 0.5}, {"step": 2}]


@pytest.mark.parametrize(
    ("status", "all_have_it", "result"),
    [(0, False, 0), (2, True, 2), (2, False, None), (1, True, None)],
)
def test_ray_worker_raises_errors_worth_a_restart(
    status, all_have_it, result, monkeypatch, tmp_path, ray
):
    monkeypatch.chdir(tmp_path)  # which is undone
    monkeypatch.setattr(train, "main", lambda arguments, supervisor: status)
    monkeypatch.setattr(ray_cluster, "all_arrive", lambda name, seconds: all_have_it)
    config = {"arguments": [], "working_directory": str(tmp_path)}
    if result is None:
        with pytest.raises(RuntimeError, match=f"ended with status {status}"):
            ray_cluster.train(config)
    else:
        assert ray_cluster.train(config) == result


class Preempted(Supervisor):
    def __init__(self):
        self.steps = []

    def step_ended(self, step, metrics):
        assert "critic/rewards/mean" in metrics
        self.steps.append(step)
        return step == 1


@pytest.mark.slow
def test_a_run_saves_when_its_supervisor_asks(tmp_path):
    supervisor = Preempted()
    flags = [*FLAGS, "--steps=3", "--checkpoint-every=100", "--keep-checkpoints=9"]
    assert train.main([*flags, f"--run-dir={tmp_path / 'run'}"], supervisor) == 0
    assert supervisor.steps == [1, 2, 3]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [0, 1, 3]
    assert len(metrics(tmp_path / "run")) == 4
