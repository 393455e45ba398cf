"""A run of the command line, made once and looked at by several files."""

import pytest
from command_runs import FLAGS

from jrl.train import main


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory):
    """The folder of a run of two steps. Nothing may be written to it."""
    path = tmp_path_factory.mktemp("commands") / "run"
    assert main([*FLAGS, "--run-dir", str(path)]) == 0
    return path
