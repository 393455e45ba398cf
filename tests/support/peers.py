"""Python environments with other libraries."""

import os
import subprocess
import sys
from typing import Any

import pytest


def peer_with(*packages: str, **account: Any) -> str:
    """Python of an environment that has other libraries: this one, or the interpreter in
    ``JRL_PEER_PYTHON``. If there is none, the test is skipped by their names.

    Args:
      account: arguments of `subprocess.run` that start it as another user.
    """
    python = os.environ.get("JRL_PEER_PYTHON", sys.executable)
    imports = [python, "-c", f"import {', '.join(packages)}"]
    try:
        status = subprocess.run(imports, capture_output=True, **account).returncode
    except PermissionError:
        pytest.skip(f"{python} cannot be started by {account.get('user')} in {account.get('cwd')}")
    if status:
        pytest.skip(f"{python} lacks one of {', '.join(packages)}: set JRL_PEER_PYTHON")
    return python
