"""Python tool: code that a policy wrote, run in a sandbox (`jrl.tasks.sandbox`)."""

from jrl.tasks.sandbox.sandbox import Sandbox as Sandbox
from jrl.tasks.tools.tool import Tool


def python_tool(sandbox: Sandbox | None = None) -> Tool:
    """The sandbox as a tool; it runs once here, so that limits that are too low fail early.

    Raises:
      ValueError: if this machine cannot confine code, or an empty program does not run within the
        limits.
    """
    sandbox = Sandbox() if sandbox is None else sandbox
    if output := sandbox.run(""):
        raise ValueError(f"{sandbox} leaves no code to run: {output.splitlines()[-1]}")
    network = "a" if sandbox.network else "no"
    code = f"A program; it has {sandbox.seconds:g} seconds and {network} network."
    description = "Runs Python code and gives what it prints."
    return Tool.of(sandbox.run, name="python", description=description, about={"code": code})
