"""The tool that runs a program of the policy."""

import pytest
from confinement import needs_bubblewrap

from jrl.tasks.tools.python import Sandbox, python_tool


@needs_bubblewrap
def test_the_policy_is_told_what_its_code_has():
    parameters = python_tool(Sandbox(seconds=2, network=True)).parameters
    about = parameters["properties"]["code"]["description"]
    assert about == "A program; it has 2 seconds and a network."


@needs_bubblewrap
def test_limits_that_leave_nothing_to_run_are_refused():
    with pytest.raises(ValueError, match="leaves no code to run"):
        python_tool(Sandbox(memory_mb=1))
