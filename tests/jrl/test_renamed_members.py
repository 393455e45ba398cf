"""Names, members and keywords of the release before lead to today's."""

import inspect

import numpy as np
import pytest

from jrl.faults.collect.vocabulary import error_code
from jrl.recipes import AdaptiveTemperature, dapo, grpo, hapo, ppo, tppo, vapo
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.runs.folder import RunFolder
from jrl.trainer.evaluation.evaluate import evaluate
from moe.huggingface import load_weights

REQUEST = Request(3, 0, np.zeros(2, np.int32), 4)
TRAJECTORY = Trajectory(REQUEST, np.zeros(1, np.int32), "stop", None, 0)
FOLDER = RunFolder("a run that is not there")


@pytest.mark.parametrize(
    ("holder", "former", "present"),
    [
        (REQUEST, "own", "sampling"),
        (REQUEST, "turns", "conversation"),
        (REQUEST, "begun", "has_response"),
        (TRAJECTORY, "shelf", "buffer"),
        (error_code(79), "number", "code"),
        (FOLDER, "line_marks", "line_offsets"),
        (FOLDER, "file_marks", "file_hashes"),
        (FOLDER, "go_back", "rewind"),
        (AdaptiveTemperature(), "at", "token_temperatures"),
        (FOLDER, "begin_again", "discard_unsaved"),
    ],
)
def test_former_members(holder, former, present):
    with pytest.warns(DeprecationWarning, match=f"{former} is now .*{present}"):
        assert getattr(holder, former) == getattr(holder, present)


@pytest.mark.parametrize(
    ("function", "former", "present"),
    [(evaluate, "found", "on_completions"), (load_weights, "places", "target_shardings")],
)
def test_former_keywords(function, former, present):
    assert present in inspect.signature(function).parameters
    # Renamed first; then other arguments are missing.
    with (
        pytest.warns(DeprecationWarning, match=f"{former}=.* is now .*{present}="),
        pytest.raises(TypeError, match="missing"),
    ):
        function(**{former: None})


@pytest.mark.parametrize("module", [dapo, grpo, hapo, ppo, tppo, vapo])
def test_former_functions_of_recipes(module):
    with pytest.warns(DeprecationWarning, match=r"paper is now .*\.[A-Z][a-z]*\.paper"):
        assert module.paper().prompts > 0
