"""The compilers of absent accelerators, for tests that need them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.absent.compilers import missing
from benchmarks.absent.descriptions import GPUS, TPUS

ROOT = Path(__file__).parents[2]
REQUIRED = os.environ.get("JRL_GATE") == "accelerators"
"""The gate has an environment for them: there, a missing compiler is a failure."""


def needs_compiler(platform):
    """Marks tests that compile for "cuda" or "tpu"."""
    reason = missing(platform)
    return pytest.mark.skipif(reason is not None and not REQUIRED, reason=str(reason))


def run(*arguments):
    """`python -m benchmarks.absent` with arguments, in a process of its own."""
    # Tests compile with few optimisations and for many CPU devices; users do not.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.absent", *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr[-2000:]
    return done


def compiled(part, folder, *arguments):
    """The rows of a part of `benchmarks.absent`, in one process: tests run beside one another."""
    run(part, "--quick", "--processes", "1", "--out", str(folder), *arguments)
    return json.loads((folder / "absent.json").read_text())[part]


def compiled_step(kind, folder):
    """The row of a training step on eight devices, which it fits."""
    (row,) = compiled("steps", folder, "--only", kind)
    assert "error" not in row, row["error"]
    memory = (GPUS | TPUS)[kind].memory
    assert 0 < row["arguments"] + row["temporaries"] < 0.9 * memory
    return row
