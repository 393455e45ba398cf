"""Whole runs, made once and looked at by several files."""

import pytest
from small_runs import Finished, finish


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The run of a recipe, from its warm start to its end."""
    made: dict[str, Finished] = {}

    def of(name: str) -> Finished:
        if name not in made:
            made[name] = finish(name, tmp_path_factory.mktemp("runs") / name)
        return made[name]

    return of
