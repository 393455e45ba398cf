"""Tool that runs a program of the policy."""

import pytest
from confinement import needs_bubblewrap

from jrl.tasks.tools.python import Sandbox, python_tool


@needs_bubblewrap
def test_python_tool_description():
    parameters = python_tool(Sandbox(seconds=2, network=True)).parameters
    about = parameters["properties"]["code"]["description"]
    assert about == "A program; it has 2 seconds and a network."


@needs_bubblewrap
def test_python_tool_refuses_limits_that_are_too_low():
    with pytest.raises(ValueError, match="leaves no code to run"):
        python_tool(Sandbox(memory_mb=1))
