"""Whole runs, made once and looked at by several files."""

import pytest
from command_runs import FLAGS
from small_runs import Finished, finish

from jrl.report.plots import plot_run
from jrl.train import main
from jrl.trainer import outputs


@pytest.fixture(autouse=True, scope="session")
def _no_pictures():
    """Pictures take most of the time of a small run whose programs are there already: a run draws
    them if a test asks for `pictures`, and `tests/jrl/report` draws all kinds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "plot_run", lambda *paths, title: [])
        yield


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    """Unnamed folders must not land in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pictures(monkeypatch):
    """Runs end with the pictures of their metrics."""
    monkeypatch.setattr(outputs, "plot_run", plot_run)


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
