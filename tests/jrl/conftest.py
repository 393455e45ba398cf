"""Whole runs, made once and looked at by several files."""

import pytest
from command_runs import FLAGS
from small_runs import Finished, finish

from jrl.train import main


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory):
    """The folder of a run of two steps by command line. Nothing may be written to it."""
    path = tmp_path_factory.mktemp("commands") / "run"
    assert main([*FLAGS, "--run-dir", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The run of a recipe, from its warm start to its end."""
    made: dict[str, Finished] = {}

    def of(name: str) -> Finished:
        if name not in made:
            made[name] = finish(name, tmp_path_factory.mktemp("runs") / name)
        return made[name]

    return of
